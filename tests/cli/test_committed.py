"""train, quantize and export refuse committed generated code that a build would change, and nothing else."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from specc.cli.committed import compile_committed, require_built, require_built_run
from specc.compiler.build import build
from specc.compiler.generated_folder import StaleCode
from specc.compiler.spec.check import load
from specc.runtime.storage.run_directory import Run
from specc.runtime.support import native

BASE = Path(__file__).parents[1] / "errors/decoder.yaml"
SPEC = Path("specs/tiny.yaml")
MODEL = Path("generated/tiny/cpu/model.py")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a spec, its generated code, and a run of the spec."""
    monkeypatch.chdir(tmp_path)
    SPEC.parent.mkdir()
    shutil.copy(BASE, SPEC)
    build(SPEC, Path("generated"))
    Run(Path("runs/a"), load(SPEC)[0], "cpu", "stdlib").create()
    return tmp_path


def edit_code() -> None:
    MODEL.write_text(MODEL.read_text() + "# mine\n")


def delete_code() -> None:
    MODEL.unlink()


def edit_spec() -> None:
    SPEC.write_text(SPEC.read_text().replace("relu(x) ** 2", "gelu(x)"))


def edit_code_and_delete_the_manifest() -> None:
    edit_code()
    Path("generated/tiny/manifest.json").unlink()


@pytest.mark.parametrize("change", [edit_code, delete_code, edit_spec, edit_code_and_delete_the_manifest])
def test_training_refuses(project: Path, change: Callable[[], None]) -> None:
    require_built(SPEC, "tiny", "cpu")
    change()
    with pytest.raises(StaleCode, match=r"generated/tiny/cpu/\S+") as caught:
        require_built(SPEC, "tiny", "cpu")
    assert caught.value.exit_code == 2 and "`specc build specs/tiny.yaml`" in caught.value.hint


@pytest.mark.parametrize("change", [edit_code, delete_code])
def test_work_on_a_run_refuses(project: Path, change: Callable[[], None]) -> None:
    require_built_run(Path("runs/a"))
    change()
    with pytest.raises(StaleCode, match=r"generated/tiny/cpu/model\.py"):
        require_built_run(Path("runs/a"))


def test_a_run_stays_usable_after_its_spec_has_changed(project: Path) -> None:
    edit_spec()
    build(SPEC, Path("generated"))
    require_built_run(Path("runs/a"))


def test_without_generated_code_nothing_is_compared(project: Path) -> None:
    shutil.rmtree("generated")
    require_built(SPEC, "tiny", "cpu")
    require_built_run(Path("runs/a"))


def test_only_the_target_and_files_of_a_build_count(project: Path) -> None:
    Path("generated/tiny/cpu/notes.txt").write_text("of a reader\n")
    Path("generated/tiny/PLAN.md").write_text("edited\n")
    require_built(SPEC, "tiny", "cpu")


def test_the_folder_of_another_spec_of_the_same_name_is_not_compared(project: Path) -> None:
    manifest = Path("generated/tiny/manifest.json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "source": "specs/other.yaml"}))
    edit_code()
    require_built(SPEC, "tiny", "cpu")


def test_nvcc_and_the_driver_start_before_torch_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, started = tmp_path / "generated" / "tiny" / "sm90", list[Path | str]()
    folder.mkdir(parents=True)
    (folder / "a.cu").write_text("// kernel")
    (tmp_path / "specs").mkdir()
    path = tmp_path / "specs" / "tiny.yaml"
    monkeypatch.setattr(native, "compile_ahead", started.append)
    monkeypatch.setattr(native, "initialize_driver", lambda: started.append("driver"))
    spec, both = (
        SimpleNamespace(name="tiny", targets=("cpu", "sm90")),
        SimpleNamespace(name="tiny", targets=("sm90", "sm100")),
    )
    monkeypatch.setattr(shutil, "which", lambda name: None)
    compile_committed(path, spec, "sm90")
    assert started == []  # no driver
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    for other, target in ((both, None), (spec, "cpu"), (spec, "sm100"), (spec, "no target")):
        compile_committed(path, other, target)
    assert started == []
    for case in ((spec, None), (both, "sm90")):
        compile_committed(path, *case)
    assert started == ["driver", folder, "driver", folder]
