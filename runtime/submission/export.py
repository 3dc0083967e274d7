"""Writes a submission: train_gpt.py and the weights of a quantized run, beside each other."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specc.compiler.build import canonical
from specc.compiler.spec.train import BitsSpec
from specc.runtime.artifact.artifact import write_artifact
from specc.runtime.artifact.codecs import Codec
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.data.tokenizers.from_spec import tokenizer_of
from specc.runtime.errors import IntegrityError, RunFailure
from specc.runtime.export.run import ExportError
from specc.runtime.model.load import choose_target
from specc.runtime.open_model import Say, Verified, as_trained, read_verified
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.committed import Committed
from specc.runtime.storage.quantized_run import REPORT, quantized_artifact
from specc.runtime.storage.run_directory import Run
from specc.runtime.submission.bundle import train_gpt
from specc.runtime.submission.count import SubmissionSize, submission_size
from specc.runtime.submission.names import CODE, LIMIT, WEIGHTS


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
    """Writes train_gpt.py and final_model.specc of the quantized run at `path` into the folder `out`; returns what they
    take.

    The weights are those of the run's artifact, compressed by `codec`; the code, for `targets` (all of the spec's where
    none is named), trains, quantizes and scores with torch and numpy alone, and brotli where that is the codec. The
    code is written last: a folder with it is whole. `say` is told of weights that are older than the run's, and of
    files that are over the spec's `quant.budget_bytes` (the challenge's limit where it has none), in which the code
    counts.

    Raises ExportError (2) where one of the files exists, unless `force`, or the run is of a kind that no submission can
    be of; TargetError (2); DataError without the tokenizer; otherwise as `specc.runtime.export.run.export`.
    """
    run = _of_text(Run.open(path))
    say = say or (lambda _: None)
    source = quantized_artifact(run, say)
    overrides = json.loads(Committed.open(run.quantized).read(REPORT)).get("overrides", ())
    run = run.requantized(overrides)
    again = shlex.join(["specc", "quantize", str(path), *(word for text in overrides for word in ("--set", text))])
    spec = run.spec
    assert spec.quant is not None
    found = read_verified(source)
    if any(scheme.integer for scheme in found.stored.schemes.values()):
        raise ExportError(f"{spec.name} multiplies in whole numbers", "a submission takes round, gptq and none")
    targets = tuple(dict.fromkeys(choose_target(spec, target) for target in targets)) or spec.targets
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} is not a folder", "name a folder with --out")
    code, weights = out / CODE, out / WEIGHTS
    for file in (code, weights):
        if file.exists() and not force:
            raise ExportError(f"{file} exists", "name another folder with --out, or replace it with --force")
    if _without_rules(canonical(found.spec)) != _without_rules(canonical(spec)):
        if as_trained(run, lambda _: None)[0].spec != spec:
            raise RunFailure(f"{path} ended before its last phase, which a submission trains", run.resume_command)
        raise RunFailure(f"{source} was made of another spec than the run has now", again)
    text = _code(run, targets, search, codec)
    with _whole_or_none(out, code):
        _write(found, text, code, weights, codec)
    python = ".".join(map(str, sys.version_info[:2]))  # ast.unparse may write what older ones cannot read
    needs = f"Python {python} or later, {'torch, numpy and brotli' if codec == Codec.BROTLI else 'torch and numpy'}"
    say(f"{', '.join(targets)}; the weights are compressed by {codec.name.lower()}: it needs {needs}")
    size = submission_size(out, spec.quant.budget_bytes or LIMIT)
    if size.over:
        say(f"{size.total:,} bytes, code included, are over the budget of {size.budget:,}; both files are written")
        fits = f"{again} --for submission, then export again with --force"
        say(f"what leaves room for the code: {fits}" if codec == Codec.BROTLI else f"smaller by brotli, or {fits}")
    return size


@contextmanager
def _whole_or_none(out: Path, code: Path) -> Iterator[None]:
    """The folder `out`, without the code that is to be replaced. After a failure, none where there was none before."""
    there = out.exists()
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
            code.unlink(missing_ok=True)
        except OSError as error:
            raise RunFailure(f"cannot write {out}: {error.strerror}") from error
        yield
    except BaseException:
        if not there:
            shutil.rmtree(out, ignore_errors=True)
        raise


def _write(found: Verified, text: str, code: Path, weights: Path, codec: Codec) -> None:
    """Writes the weights, and then the code, which makes a submission whole."""
    deployment = Deployment.of(found.spec)
    write_artifact(
        weights,
        spec=canonical(found.spec).encode(),
        interface=deployment.interface,
        code=deployment.code,
        layout=deployment.layout,
        tensors=found.stored.tensors,
        codec=codec,
    )

    def check(temporary: Path) -> None:
        if temporary.read_bytes() != text.encode():
            raise IntegrityError(f"{code}: what was written does not read back", "check disk and memory")

    write_atomically(code, [text.encode()], check)


def code_bytes(path: Path, overrides: Sequence[str] = (), search: Sequence[Path] = ()) -> int:
    """The bytes of the train_gpt.py that `export_submission` would write of the run at `path`, for all targets of its
    spec, and weights by brotli. Raises as that does."""
    return len(_code(_of_text(Run.open(path).requantized(overrides)), (), search, Codec.BROTLI).encode())


def _of_text(run: Run) -> Run:
    """The run, if a submission can be of its kind. Raises ExportError."""
    spec = run.spec
    if spec.quant is None or not isinstance(spec.eval, BitsSpec):
        raise ExportError(f"{spec.name} is no quantized model of text", "a submission is scored in bits per byte")
    if spec.train.teacher_forcing is not None:
        raise ExportError(f"{spec.name} trains by teacher forcing", "a submission trains on windows of text")
    return run


def _code(run: Run, targets: Sequence[str], search: Sequence[Path], codec: Codec) -> str:
    tokenizer = tokenizer_of(run.spec, [run.files, *search, *_places(run)])
    return train_gpt(run.spec, run.lock, targets or run.spec.targets, tokenizer, codec)


def _without_rules(text: str) -> object:
    """A resolved spec without what quantizing decides."""
    data = json.loads(text)
    for decided in ("rules", "promote", "allocate", "correct"):
        data["quant"].pop(decided, None)
    return data


def _places(run: Run) -> list[Path]:
    data = Path(run.data)
    return [data if data.is_dir() else data.parent, Path()]
