"""The program of a submission: trains and quantizes a model, writes the weights, and scores them.

`python train_gpt.py [train]` runs all stages. `python train_gpt.py score WEIGHTS` only scores. `torchrun` starts the
program on several GPUs. The program saves the trained weights until they are quantized. If quantization fails, `python
train_gpt.py quantize WEIGHTS` continues from the saved weights. The data are token shards. The option `--data` or the
environment variable DATA_PATH names their folder.
"""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler.targets import TARGETS
from specc.runtime.artifact.artifact import measured_bytes, write_artifact
from specc.runtime.artifact.codecs import compress
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized
from specc.runtime.data.errors import DataError
from specc.runtime.data.windows.evaluation import WindowPlan
from specc.runtime.data.windows.loader import Loader
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.distributed.launch import is_launched
from specc.runtime.distributed.world import World, joined
from specc.runtime.errors import EnvironmentFailure, RunFailure, RuntimeFailure
from specc.runtime.log import Reporter, Silence, Step
from specc.runtime.metrics.bits_per_byte import BitsPerByte, ScoredText, evaluate_bits
from specc.runtime.metrics.share import Share
from specc.runtime.metrics.validation import Validation
from specc.runtime.model.load import choose_target, device_of
from specc.runtime.quantize.weights import TrainedModel, quantize_weights
from specc.runtime.storage.checkpoint import Snapshot
from specc.runtime.storage.data_digests import DataDigests
from specc.runtime.submission import plan
from specc.runtime.submission.model import (
    CODEC,
    SHAPES,
    TOKENIZER,
    CarriedModel,
    artifact_contents,
    folder,
    initialized,
    read_weights,
    realized,
    trained_model,
)
from specc.runtime.submission.names import WEIGHTS
from specc.runtime.support.native import compile_ahead
from specc.runtime.train.loop import Limits, Loop
from specc.runtime.train.sources.feed import Windows
from specc.runtime.train.trainer import TrainableModel, Trainer

# The folder in which the challenge stores shards for this vocabulary size
DATA = f"data/datasets/fineweb10B_sp{plan.TOKENIZER[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program with command-line `arguments`. Returns its exit code. Exit codes have the same meanings as in
    specc.
    """
    options = _options(arguments)
    try:
        with joined() if is_launched() else nullcontext(World.alone()) as world:
            target = choose_target(CarriedModel, options.target)
            device = torch.device(device_of(TARGETS[target]))
            if device.type == "cuda" and not torch.cuda.is_available():
                raise EnvironmentFailure(f"{target} needs an NVIDIA GPU, and torch finds none", "give another --target")
            world = world.on(device)
            if options.command != "score":
                _train_and_quantize(world, target, options)
            result = score(world, target, options)
            if not world.rank:
                print(json.dumps(result.facts()))
    except (RuntimeFailure, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _options(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="train_gpt.py", description=f"{plan.NAME}: train, quantize, score.")
    parser.add_argument("command", nargs="?", choices=("train", "quantize", "score"), default="train")
    parser.add_argument("weights", nargs="?", default=WEIGHTS, help=f"file to write or to score; {WEIGHTS} where unset")
    parser.add_argument("--data", default=os.environ.get("DATA_PATH", DATA), help="folder of token shards")
    parser.add_argument(
        "--target", choices=plan.TARGETS, help="the target to run on; by default, the best one for this machine"
    )
    parser.add_argument("--steps", type=_count, help="the number of training steps")
    parser.add_argument(
        "--budget", type=_count, help="the limit of code and weights in bytes; by default, that of the spec"
    )
    parser.add_argument("--max-tokens", type=_count, help="score only this number of tokens")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


@dataclass(frozen=True)
class TrainedFile:
    """The file of trained weights, which replaces the checkpoints in a submission. It is removed after quantization."""

    weights: Path  # the path of the quantized weights, in the same folder
    target: str
    resume_command: str
    spec_digest = plan.SPEC_DIGEST

    @property
    def directory(self) -> Path:
        return self.weights.parent

    @property
    def path(self) -> Path:
        return self.weights.with_name(f"{self.weights.name}.trained")

    def logged_loss(self, step: int) -> float | None:
        return None

    def save(self, snapshot: Snapshot) -> Path:
        """Writes the final weights atomically, in f32, and returns the path.

        Raises RunFailure if the file cannot be written, or if the run has not reached its last phase.
        """
        if any(snapshot.done < phase.until for phase in plan.PHASES):
            raise _too_few(snapshot.step)
        staged = self.path.with_name(f"{self.path.name}.tmp")
        tensors = snapshot.average if snapshot.average is not None else snapshot.weights
        try:
            torch.save({name: tensor.detach().float().cpu() for name, tensor in tensors.items()}, staged)
            staged.replace(self.path)
        except OSError as error:
            raise RunFailure(f"cannot write {self.path}: {error.strerror}") from error
        return self.path

    def load(self, device: torch.device) -> dict[str, Tensor]:
        """Returns the weights that `save` wrote, by name, on `device`.

        Raises RunFailure if the file is missing, or has the weights of another model.
        """
        try:
            weights = torch.load(self.path, map_location=device, weights_only=True)
        except FileNotFoundError:
            message = f"there is no {self.path}"
            raise RunFailure(message, "train first: quantization needs trained weights") from None
        except Exception as error:
            raise RunFailure(f"{self.path} contains no trained weights: {error}", "train again") from error
        if not isinstance(weights, dict) or {n: tuple(getattr(t, "shape", ())) for n, t in weights.items()} != SHAPES:
            raise RunFailure(f"{self.path} contains the weights of another model", "train again")
        return weights


def _show(step: Step, done: float) -> None:
    if step.step % 100 == 0 or step.step <= 10:
        _print(f"step {step.step}: loss {step.loss:.4f}, {step.seconds:.1f} s")


def _train_and_quantize(world: World, target: str, options: Any) -> None:
    """Trains the model, unless the command is `quantize`. Then quantizes the model on rank 0.

    The quantized weights are written to the file `options.weights`.
    """
    out = Path(options.weights)
    if out.is_dir() or not out.parent.is_dir():  # checked before training, so that the work of training is not lost
        raise RunFailure(f"{out} is not the path of a file", "name a file in a folder that exists")
    compress(b"", 0, CODEC)  # raises an error before training if brotli is not installed
    places = [shlex.quote(str(place)) for place in (sys.argv[0], out, options.data)]
    chosen = f" --target {options.target}" if options.target else ""
    trained = TrainedFile(out, target, "python {} quantize {} --data {}".format(*places) + f"{chosen} [--budget BYTES]")
    streams = [open_stream(options.data, split, TOKENIZER, None) for split in ("train", "val")]
    if options.command == "quantize":
        trained.load(world.device)  # raises an error before earlier weights are renamed
    before = out.with_name(f"{out.name}.before")
    if not world.rank and out.exists():  # if this run fails, nobody mistakes the old file for its result
        try:
            out.replace(before)
        except OSError as error:
            raise RunFailure(f"cannot rename {out}: {error.strerror}") from error
        print(f"{out} is renamed to {before} until a new file is written", file=sys.stderr)
    if options.command != "quantize":
        train(world, target, options.steps, streams, trained)
    if not world.rank:
        model = trained_model(CarriedModel(target, world.device, trained.load(world.device)), streams[0])
        try:
            digests = DataDigests(train=streams[0].digest, val=streams[1].digest)
            quantize(model, out, digests, options.budget)
        except BaseException:
            print(
                f"the trained weights are saved in {trained.path}; resume with: {trained.resume_command}",
                file=sys.stderr,
            )
            raise
        trained.path.unlink()
        before.unlink(missing_ok=True)
    world.wait()
    for stream in streams:
        stream.close()


def train(world: World, target: str, steps: int | None, streams: Sequence[TokenStream], trained: TrainedFile) -> None:
    """Trains the model to the end of the run, or for `steps` updates, and saves the weights.

    Args:
        world: the processes that train together, with their devices.
        target: the target whose generated code is trained.
        steps: the number of updates; None for all updates of the run.
        streams: the training and validation tokens.
        trained: the file to which the weights are saved.

    Raises:
        RunFailure: if training ends before the last phase of the run.
    """
    spec, window, compiled = plan.TRAIN, plan.WINDOW, world.device.type == "cuda"
    last = (steps - 1) / spec.steps if steps is not None and spec.steps is not None else 1.0
    if steps is not None and any(last < phase.until for phase in plan.PHASES):
        raise _too_few(steps)
    torch.manual_seed(spec.seed)
    model = initialized(target)
    order, rows = spec.data.order, spec.at_once(world.size)  # type: ignore[attr-defined]
    with Loader(streams[0], rows, window, order, spec.seed, world.rank, world.size, bos=TOKENIZER.bos) as loader:
        schemes = plan.BASE if spec.qat is not None else None
        params, derived = plan.PARAMS[target], plan.DERIVED[target]
        trainable = TrainableModel(model, params, window, plan.SPEC_DIGEST, plan.PHASES, schemes, derived=derived)
        trainer = Trainer(trainable, spec, Windows(loader, spec.pass_tokens(window, world.size)), world, compiled)
        if compiled:
            compile_ahead(folder(target))
        validation = Validation(streams[1], TOKENIZER, plan.EVAL.batch, spec.validate_tokens, plan.UNSCORED)
        silent = bool(world.rank)
        reporter = Reporter(Silence(), (lambda step, done: None) if silent else _show, _ignore if silent else _print)
        Loop(trained, trainer, validation, reporter, Limits(steps), trained.save).run()


def _too_few(steps: int) -> RunFailure:
    return RunFailure(f"--steps {steps} ends before the last phase of the run", "give a larger --steps, or none")


def quantize(model: TrainedModel, out: Path, trained_on: DataDigests, budget: int | None) -> None:
    """Quantizes the model and writes the weights file.

    Args:
        model: the trained model.
        out: the weights file.
        trained_on: digests of the training data.
        budget: the limit of the size of code and weights together, in bytes; None for the budget of the spec.

    Raises:
        QuantizeError: if a scheme cannot store its parameter, or the budget is too small.
        RunFailure: if GPU memory is full.
        DataError: if the training data cannot be read.
    """
    quant = plan.QUANT
    if budget is not None:
        quant = quant.model_copy(update={"budget_bytes": budget})

    def measure(stored: QuantizedModel) -> int:
        return measured_bytes(artifact_contents(stored, trained_on), codec=CODEC)

    code = Path(sys.argv[0]).stat().st_size  # the code counts towards the budget
    result = quantize_weights(model, quant, plan.BASE, measure, _print, lambda *_: None, reserved=code)
    for line in result.quantizer.overdamped(result.schemes):
        _print(line)
    size = write_artifact(out, artifact_contents(result.stored, trained_on), codec=CODEC)
    _print(f"{out}: {size.total:,} bytes")


def score(world: World, target: str, options: Any) -> BitsPerByte:
    """Returns the bits per byte of a weights file on the validation text. Several ranks share the work.

    Raises RunFailure if the loss is not finite. Raises IntegrityError if the weights file is not valid.
    """
    stored, known = read_weights(Path(options.weights))
    model = realized(target, dequantized(stored), world.device)
    call = torch.compile(model.score, fullgraph=True) if world.device.type == "cuda" else model.score
    stream = open_stream(options.data, "val", TOKENIZER, None)
    try:
        windows = WindowPlan(plan.EVAL.window or plan.WINDOW, plan.EVAL.batch, plan.EVAL.stride, plan.UNSCORED)
        text = ScoredText(stream, TOKENIZER, options.max_tokens)
        result = evaluate_bits(call, text, windows, world.device, Share(world.rank, world.size, world.totals))
    finally:
        stream.close()
    if not math.isfinite(result.nats):
        raise RunFailure(f"the loss is {result.nats}", "the weights are broken")
    return replace(result, held_out=None if known is None else known.held_out(stream.digest))


def _ignore(line: str) -> None: ...


def _print(line: str) -> None:
    print(line, flush=True)
