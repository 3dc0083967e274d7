"""Exports a submission: train_gpt.py and the weights of a quantized run, in one folder."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specc.compiler import pipeline
from specc.compiler.build import canonical
from specc.compiler.plan.lock import Lock
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.train import BitsSpec
from specc.compiler.text.shell import shell_path
from specc.runtime.artifact.codecs import Codec
from specc.runtime.data.tokenizers.from_spec import tokenizer_of
from specc.runtime.errors import ExportError, IntegrityError, RunFailure, cannot_write
from specc.runtime.model.load import choose_target
from specc.runtime.open_model import Say, as_trained, read_verified
from specc.runtime.quantize.written_artifact import write_quantized
from specc.runtime.storage.atomic import create_folder, require_replaceable, write_atomically
from specc.runtime.storage.committed import Committed
from specc.runtime.storage.quantized_run import REPORT, quantized_artifact
from specc.runtime.storage.run_directory import Run
from specc.runtime.submission.bundle import train_gpt
from specc.runtime.submission.count import SubmissionSize, submission_size
from specc.runtime.submission.names import CODE, LIMIT, WEIGHTS
from specc.runtime.support.native import CUTLASS

COMPILED = ("cuda", "cutlass")  # languages that nvcc compiles, with the headers of CUTLASS


def export_submission(
    path: Path,
    out: Path,
    *,
    codec: Codec = Codec.BROTLI,
    targets: Sequence[str] = (),
    search: Sequence[Path] = (),
    force: bool = False,
    say: Say | None = None,
) -> SubmissionSize:
    """Writes train_gpt.py and final_model.specc of the quantized run at `path` into the folder `out`.

    The weights come from the artifact of the run. The code in train_gpt.py trains, quantizes and scores the model. The
    code needs torch, numpy, and the package of `codec`. If a kernel is in CUDA C++, the code also needs nvcc and
    CUTLASS. The code file is written last. If a folder has a code file, the submission is therefore complete.

    Args:
        path: the run directory.
        out: the output folder. It is created if it does not exist.
        codec: the compression of the weights.
        targets: the targets to include; all targets of the spec if empty.
        search: additional folders to search for the tokenizer.
        force: whether to overwrite existing files.
        say: the function that receives messages about requirements of the code, an outdated artifact, and an exceeded
            budget.

    Returns:
        The sizes of the code and the weights in bytes.

    Raises:
        ExportError (exit code 2): if a file exists and `force` is False, `out` is not a folder, or the run cannot be
            exported as a submission.
        TargetError (2): if a target is not valid for the spec.
        DataError: if the tokenizer is missing.
        RunDirectoryError: if `path` is not a run.
        RunFailure: if the run is not quantized, it ended before its last phase, or its spec changed after quantization.
        IntegrityError: if the run or its artifact is damaged.
        EnvironmentFailure: if a file cannot be written.
    """
    run = _of_text(Run.open(path))
    say = say or (lambda _: None)
    source = quantized_artifact(run, say)
    overrides = json.loads(Committed.open(run.quantized).read(REPORT)).get("overrides", ())
    run = run.requantized(overrides)
    again = " ".join([f"specc quantize {shell_path(path)}", *(f"--set {shlex.quote(text)}" for text in overrides)])
    spec = run.spec
    assert spec.quant is not None
    artifact = read_verified(source)
    if any(scheme.integer for scheme in artifact.stored.schemes.values()):
        message = f"{spec.name} has int8 products, which a submission does not support"
        raise ExportError(message, "use the methods round, gptq and none in quant")
    targets = tuple(dict.fromkeys(choose_target(spec, target) for target in targets)) or spec.targets
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} is not a folder", "name a folder with --out")
    code, weights = out / CODE, out / WEIGHTS
    for file in (code, weights):
        require_replaceable(file, force)
    if _without_rules(canonical(artifact.spec)) != _without_rules(canonical(spec)):
        if as_trained(run, lambda _: None)[0].spec != spec:
            raise RunFailure(
                f"{path} ended before its last phase; a submission needs the weights after it", run.resume_command
            )
        raise RunFailure(f"{source} was written before the spec of the run changed", again)
    text, (*needs, last) = _code(run, targets, search, codec), requirements(spec, run.lock, targets, codec)
    with _removed_on_failure(out, weights):
        try:
            create_folder(out)
            code.unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(out, error) from error
        write_quantized(weights, artifact.spec, artifact.stored, artifact.trained_on, codec)

        def check(temporary: Path) -> None:
            if temporary.read_bytes() != text:
                message = f"{code}: the file does not contain what was written"
                raise IntegrityError(message, "check disk and memory")

        write_atomically(code, [text], check)
    compressed = f"compresses the weights with {codec.name.lower()}"
    say(f"{CODE} is for {', '.join(targets)}, {compressed}, and needs {', '.join(needs)} and {last}")
    size = submission_size(out, spec.quant.budget_bytes or LIMIT)
    if size.over:
        say(f"{size.total:,} bytes, code included, are over the budget of {size.budget:,}; both files are written")
        fits = f"{again} --for submission, then export again with --force"
        say(
            f"to leave room for the code: {fits}"
            if codec == Codec.BROTLI
            else f"use brotli, which compresses better, or {fits}"
        )
    return size


@contextmanager
def _removed_on_failure(folder: Path, file: Path) -> Iterator[None]:
    fresh = [path for path in (file, folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in fresh:
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise


def code_bytes(path: Path, overrides: Sequence[str] = (), search: Sequence[Path] = ()) -> int:
    """Returns the size in bytes of the train_gpt.py that `export_submission` would write for the run at `path`.

    The size is for all targets of the spec, with brotli compression. Raises ExportError if the run cannot be exported
    as a submission. Raises DataError if the tokenizer is missing.
    """
    return len(_code(_of_text(Run.open(path).requantized(overrides)), (), search, Codec.BROTLI))


def _of_text(run: Run) -> Run:
    spec = run.spec
    if spec.quant is None or not isinstance(spec.eval, BitsSpec):
        raise ExportError(f"{spec.name} is not a quantized text model", "a submission is scored in bits per byte")
    if spec.train.teacher_forcing is not None:
        message = f"{spec.name} has train.teacher_forcing, which a submission does not support"
        raise ExportError(message, "remove train.teacher_forcing")
    if spec.train.start is not None:
        message = f"{spec.name} has train.start, but a submission trains from random weights"
        raise ExportError(message, "remove train.start")
    return run


def _code(run: Run, targets: Sequence[str], search: Sequence[Path], codec: Codec) -> bytes:
    tokenizer = tokenizer_of(run.spec, [run.files, *search, *_places(run)])
    return train_gpt(run.spec, run.lock, targets or run.spec.targets, tokenizer, codec)


def requirements(spec: Spec, lock: Lock, targets: Sequence[str], codec: Codec) -> list[str]:
    """Returns the requirements of train_gpt.py: Python, nvcc if a kernel is in CUDA C++, and the Python packages.

    Args:
        spec: the spec of the run.
        lock: the kernels that `specc tune` measured as the fastest.
        targets: the targets whose code the submission contains.
        codec: the compression of the weights.
    """
    # ast.unparse may write syntax that older versions of Python cannot parse
    python = f"Python {'.'.join(map(str, sys.version_info[:2]))} or later"
    plans = [pipeline.plan(spec, target, "", lock) for target in targets]
    kernels = {choice.kernel for plan in plans for choice in plan.choices}
    compiled = any(kernel.language in COMPILED for kernel in kernels)
    packages = ["torch", "numpy", *["brotli"] * (codec == Codec.BROTLI), *[CUTLASS] * compiled]
    return [python, *["nvcc"] * compiled, *packages, *sorted({kernel.package for kernel in kernels} - {""})]


def _without_rules(text: str) -> object:
    data = json.loads(text)
    for decided in ("rules", "promote", "allocate", "correct"):
        data["quant"].pop(decided, None)
    return data


def _places(run: Run) -> list[Path]:
    data = Path(run.data)
    return [data if data.is_dir() else data.parent, Path()]
