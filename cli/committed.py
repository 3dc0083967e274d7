"""Checks that committed generated code is up to date.

Training, quantization and export generate the code again from the spec, and run this new code. If the committed code
differed from the new code, reviewers would read code that never runs.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from specc.cli.options import generated_beside
from specc.compiler.text.shell import shell_path


def require_built(spec: Path, name: str, target: str) -> None:
    """Raises StaleCode if the folder generated/NAME beside a spec is outdated for a target.

    If the folder does not exist, the function does nothing. Overrides do not matter, because the folder is built from
    the spec without overrides.
    """
    folder = generated_beside(spec) / name
    manifest = _manifest(folder)
    if not folder.is_dir() or manifest.get("source", f"specs/{name}.yaml") not in (f"specs/{spec.name}", spec.name):
        return
    from specc.compiler.build import compile_spec
    from specc.compiler.generated_folder import require_current

    files = compile_spec(spec, (), (target,)).files
    require_current(folder, files, target, f"specc build {shell_path(spec)}")


def compile_committed(path: Path, spec: Any, target: str | None) -> None:
    """Starts two background tasks before Torch is imported.

    One task compiles the committed CUDA C++ files with nvcc. The other task initializes the CUDA driver. The function
    does nothing if the machine has no NVIDIA driver, the target is a CPU target, or several targets are possible.

    Args:
        path: the file of the spec.
        spec: the spec.
        target: the target that the user chose. None selects the best target of this machine.
    """
    from specc.compiler.targets import TARGETS

    gpus = [name for name in spec.targets if TARGETS[name].arch]
    possible = [target] if target else gpus
    folder = generated_beside(path) / spec.name / (possible or [""])[0]
    if len(possible) == 1 and possible[0] in gpus and shutil.which("nvidia-smi"):
        from specc.runtime.support.native import compile_ahead, initialize_driver

        initialize_driver()
        compile_ahead(folder)


def require_built_run(directory: Path) -> None:
    """Raises StaleCode if the folder generated/NAME in the working directory is outdated for a run.

    The function checks the folder only if it was built from the same spec and lock as the run.
    """
    from specc.compiler.build import canonical, compiled
    from specc.compiler.generated_folder import digest, require_current
    from specc.runtime.storage.run_directory import Run, is_run

    if not is_run(directory):  # the command itself reports the missing run
        return
    run = Run.open(directory)
    folder = Path("generated") / run.spec.name
    manifest = _manifest(folder)
    lock = digest(run.lock.text()) if run.lock.targets else None
    if manifest.get("spec") == digest(canonical(run.spec)) and manifest.get("lock") == lock:
        files = compiled(run.spec, (run.target,), run.lock).files
        require_current(folder, files, run.target, f"specc build specs/{run.spec.name}.yaml")


def _manifest(folder: Path) -> dict[str, Any]:
    from specc.compiler.generated_folder import MANIFEST

    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
