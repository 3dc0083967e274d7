"""The program of a submission: trains, quantizes, writes the weights, scores them.

`python train_gpt.py [train]` does all, `python train_gpt.py score WEIGHTS` the last; `torchrun` starts it on several
GPUs. What was trained to is kept until it is quantized: should that fail, `python train_gpt.py quantize WEIGHTS` goes
on from there. Data are token shards: `--data`, else DATA_PATH, is their folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from specc.compiler.build import interface_digest
from specc.compiler.passes.assign_quant import storage_name
from specc.compiler.quant.scheme import Scheme
from specc.compiler.targets import TARGETS
from specc.runtime.artifact.artifact import read_artifact, write_artifact
from specc.runtime.artifact.codecs import Codec, compress
from specc.runtime.artifact.layout import layout
from specc.runtime.artifact.tensors import QuantizedModel, dequantized
from specc.runtime.calibration.calibrate import calibration_windows, capture_gradients, capture_hessians
from specc.runtime.calibration.gradients import Gradients
from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.tokenizer import PieceBytes
from specc.runtime.data.windows.evaluation import WindowPlan
from specc.runtime.data.windows.loader import Loader
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.distributed.launch import is_launched
from specc.runtime.distributed.world import World, joined
from specc.runtime.dtypes import DTYPES
from specc.runtime.errors import EnvironmentFailure, RunFailure, RuntimeFailure
from specc.runtime.metrics.bits_per_byte import BitsPerByte, ScoredText, evaluate_bits
from specc.runtime.metrics.share import Share
from specc.runtime.metrics.validation import Validation
from specc.runtime.model.load import choose_target, device_of
from specc.runtime.quantize.own_text import OwnText, write_text
from specc.runtime.quantize.quantizer import Quantizer
from specc.runtime.submission import plan
from specc.runtime.submission.known import canonical, resolved
from specc.runtime.submission.names import WEIGHTS
from specc.runtime.support.native import compile_ahead
from specc.runtime.train.sources.feed import TrainingData, Windows
from specc.runtime.train.trainable_model import FakeQuantization, TrainableModel
from specc.runtime.train.trainer import Trainer

DATA = f"data/datasets/fineweb10B_sp{plan.TOKENIZER[1]}"  # where the challenge has its shards of that vocabulary
SHAPES = {p.name: tuple(p.shape) for p in next(iter(plan.PARAMS.values()))}


class Pieces:
    """The tokenizer, as far as shards need it: its separator, and how many bytes its tokens stand for."""

    name, vocab, bos, lossless, _digest = plan.TOKENIZER

    def digest(self) -> str:
        return self._digest

    def piece_bytes(self) -> PieceBytes:
        base = np.array(plan.BYTES, np.int64)
        marks = np.zeros((2, len(base)), np.bool_)
        marks[0, list(plan.SPACES)] = marks[1, list(plan.BOUNDARIES)] = True
        return PieceBytes(base, marks[0], marks[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes are those of specc."""
    options = _options(arguments)
    try:
        with joined() if is_launched() else nullcontext(World.alone()) as world:
            target = choose_target(SimpleNamespace(name=plan.NAME, targets=plan.TARGETS), options.target)  # type: ignore[arg-type]
            device = torch.device(device_of(TARGETS[target]))
            if device.type == "cuda" and not torch.cuda.is_available():
                raise EnvironmentFailure(f"{target} needs an NVIDIA GPU, and torch finds none", "give another --target")
            world = world.on(device)
            if options.command != "score":
                _make(world, target, options)
            found = score(world, target, options)
            if not world.rank:
                print(json.dumps(found.facts()))
    except (RuntimeFailure, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _options(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="train_gpt.py", description=f"{plan.NAME}: train, quantize, score.")
    parser.add_argument("command", nargs="?", choices=("train", "quantize", "score"), default="train")
    parser.add_argument("weights", nargs="?", default=WEIGHTS, help=f"file to write or to score; {WEIGHTS} where unset")
    parser.add_argument("--data", default=os.environ.get("DATA_PATH", DATA), help="folder of token shards")
    parser.add_argument("--target", choices=plan.TARGETS, help="what to run on; what fits this machine where unset")
    parser.add_argument("--steps", type=_count, help="end training after so many")
    parser.add_argument("--budget", type=_count, help="bytes of the code and the weights; the spec's where unset")
    parser.add_argument("--max-tokens", type=_count, help="score so many only")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def _make(world: World, target: str, options: Any) -> None:
    """Trains, unless that is done, quantizes on rank 0, and writes `options.weights`."""
    tokenizer: Any = Pieces()
    out = Path(options.weights)
    if out.is_dir() or not out.parent.is_dir():  # now, not after all the training
        raise RunFailure(f"{out} is not a place for a file", "name a file in a folder that exists")
    compress(b"", 0, Codec(plan.CODEC))  # likewise: brotli may not be installed
    kept = out.with_name(f"{out.name}.trained")
    streams = [open_stream(options.data, split, tokenizer, Path()) for split in ("train", "val")]
    weights = recalled(kept, world.device) if options.command == "quantize" else {}
    before = out.with_name(f"{out.name}.before")
    if not world.rank and out.exists():  # else it would be scored as new, should this run fail
        try:
            out.replace(before)
        except OSError as error:
            raise RunFailure(f"cannot put {out} aside: {error.strerror}") from error
        print(f"{out} is {before} until there is a new one", file=sys.stderr)
    if options.command != "quantize":
        weights = trained(world, target, options, tokenizer, streams)
        if not world.rank:
            keep(weights, kept)
    if not world.rank:
        try:
            quantize(weights, world.device, target, streams[0], out, options.budget)
        except BaseException:
            on = f" --target {options.target}" if options.target else ""
            places = [shlex.quote(str(place)) for place in (sys.argv[0], out, options.data)]
            goes_on = "python {} quantize {} --data {}".format(*places) + f"{on} [--budget BYTES]"
            print(f"the trained weights are kept in {kept}; go on with: {goes_on}", file=sys.stderr)
            raise
        kept.unlink()
        before.unlink(missing_ok=True)
    world.wait()
    for stream in streams:
        stream.close()


def keep(weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes the trained weights, whole or not at all."""
    staged = path.with_name(f"{path.name}.tmp")
    try:
        torch.save({name: tensor.cpu() for name, tensor in weights.items()}, staged)
        staged.replace(path)
    except OSError as error:
        raise RunFailure(f"cannot write {path}: {error.strerror}") from error


def recalled(path: Path, device: torch.device) -> dict[str, Tensor]:
    """What `keep` wrote. Raises RunFailure for any other file."""
    try:
        found = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise RunFailure(f"there is no {path}", "nothing was trained here and left to be quantized") from None
    except Exception as error:
        raise RunFailure(f"{path} holds no trained weights: {error}", "train again") from error
    if not isinstance(found, dict) or {name: tuple(getattr(one, "shape", ())) for name, one in found.items()} != SHAPES:
        raise RunFailure(f"{path} holds the weights of another model", "train again")
    return found


def trained(
    world: World, target: str, options: Any, tokenizer: Any, streams: Sequence[TokenStream]
) -> dict[str, Tensor]:
    """The weights that the training ends with, f32; said is what they score."""
    train, window = plan.TRAIN, plan.WINDOW
    torch.manual_seed(train.seed)
    model = module(target)
    initialize(model)
    order, rows = train.data.order, train.at_once(world.size)  # type: ignore[attr-defined]
    with Loader(streams[0], rows, window, order, train.seed, world.rank, world.size) as loader:
        compiled = world.device.type == "cuda"
        quantization = FakeQuantization(plan.BASE) if train.qat is not None else None
        trainable = TrainableModel(model, plan.PARAMS[target], window, plan.SPEC_DIGEST, plan.PHASES, quantization)
        data = TrainingData(loader, Windows(train.rows(window) * window))
        trainer = Trainer(trainable, train, data, world, compiled)
        if compiled:
            compile_ahead(folder(target))
        run(trainer, world, tokenizer.vocab, options.steps)
        tensors = trainer.average.tensors if trainer.average is not None else trainer.masters.tensors
        weights = {name: tensor.detach().float().clone() for name, tensor in tensors.items()}
        measured = trainer.evaluate(Validation(streams[1], tokenizer, plan.EVAL.batch, train.validate_tokens), weights)
        _say(world, f"step {trainer.step}: {measured.line()} before quantization")
    return weights


def run(trainer: Trainer, world: World, vocabulary: int, steps: int | None) -> None:
    """All updates, by the clock of rank 0. Raises RunFailure where they do not come to the last phase: before the first
    one, if the run goes by steps."""
    planned, ends = trainer.train.steps, [phase.until for phase in plan.PHASES]
    if steps is not None and planned is not None and any((steps - 1) / planned < end for end in ends):
        raise _too_few(steps)
    if trainer.compiled or trainer.train.budget_seconds is not None:
        trainer.warm_up(vocabulary)
    trainer.clock.start()
    while trainer.done < 1 and (steps is None or trainer.step < steps):
        for step in trainer.advance():
            if step.step % 100 == 0 or step.step <= 10:
                _say(world, f"step {step.step}: loss {step.loss:.4f}, {step.seconds:.1f} s")
        if world.size > 1:
            trainer.clock.agree(world.most(trainer.clock.seconds if not world.rank else 0.0)[0])
    trainer.settle()
    trainer.clock.stop()
    if trainer.segment.phase.score != "score":  # the weights file would be scored as a model that was not trained
        raise _too_few(trainer.step)


def _too_few(steps: int) -> RunFailure:
    return RunFailure(f"{steps} steps end before the last phase of the run", "give a larger --steps, or none")


def quantize(
    weights: Mapping[str, Tensor], device: torch.device, target: str, stream: TokenStream, out: Path, budget: int | None
) -> None:
    """Calibrates, chooses bits within `budget` bytes, the spec's where it is None, and writes the weights file, which
    reads back before it counts."""
    quant, seed = plan.QUANT, plan.TRAIN.seed
    if budget is not None:
        quant = quant.model_copy(update={"budget_bytes": budget})

    def windows() -> Iterator[tuple[Tensor, Tensor]]:
        if own is not None:
            return own.windows(quant.calibrate.batch)
        return calibration_windows(stream, quant.calibrate, plan.WINDOW, seed)

    own: OwnText | None = None
    hessians: Mapping[str, Tensor] = {}
    gradients: Mapping[str, Gradients] = {}
    chooses = quant.promote is not None or quant.allocate is not None
    if chooses or any(scheme.needs_hessian for scheme in plan.BASE.values()):
        if quant.calibrate.source == "self":
            model: Any = filled(module(target), weights, device, target)
            shape = SimpleNamespace(model=SimpleNamespace(window=plan.WINDOW))
            opened: Any = SimpleNamespace(tokenizer=Pieces(), spec=shape, device=device, text_model=model)
            own = write_text(opened, quant.calibrate, seed)
            print(f"wrote {own.tokens[:, 1:].numel():,} tokens to calibrate on in {own.seconds:.1f} s")
            del model, opened
        unfused = filled(module(target, plain=True), weights, device, target)
        hessians = capture_hessians(unfused, windows(), device)
        if quant.allocate is not None:
            gradients = capture_gradients(unfused, windows(), device)
    spec: Any = SimpleNamespace(quant=quant)
    quantizer = Quantizer(spec, weights, hessians, gradients, lambda stage, done, total: None)
    code = Path(sys.argv[0]).stat().st_size  # it counts too
    schemes = quantizer.chosen(plan.BASE, print, code)
    stored = quantizer.model(schemes)
    for name, scheme in schemes.items():
        solution = quantizer.solutions.get((name, scheme))
        if solution is not None and solution.damping > solution.asked:
            print(f"{name}: Cholesky failed; its Hessian is damped by {solution.damping:g} mean diagonals")
    size = write_artifact(
        out,
        spec=canonical(resolved(None, schemes)).encode(),
        interface=interface(schemes),
        code=plan.CODE,
        layout=stored.layout(),
        tensors=stored.tensors,
        codec=Codec(plan.CODEC),
    )
    print(f"{out}: {size.total:,} bytes")


def score(world: World, target: str, options: Any) -> BitsPerByte:
    """Bits per byte of a weights file, shared among the ranks."""
    tokenizer: Any = Pieces()
    schemes, tensors = read(Path(options.weights))
    weights = dequantized(QuantizedModel(schemes, SHAPES, tensors))
    model: Any = filled(module(target), weights, world.device, target)
    call: Callable[[Tensor, Tensor], Tensor] = model.score
    if world.device.type == "cuda":
        call = torch.compile(call, fullgraph=True)
    stream = open_stream(options.data, "val", tokenizer, Path())
    try:
        windows = WindowPlan(plan.EVAL.window or plan.WINDOW, plan.EVAL.batch, plan.EVAL.stride)
        text = ScoredText(stream, tokenizer, options.max_tokens)
        found = evaluate_bits(call, text, windows, world.device, Share(world.rank, world.size, world.totals))
    finally:
        stream.close()
    if not math.isfinite(found.nats):
        raise RunFailure(f"the loss is {found.nats}", "the weights are broken")
    return found


def read(path: Path) -> tuple[Mapping[str, Scheme], Mapping[str, Mapping[str, Any]]]:
    """The schemes and stored arrays of a weights file. Raises IntegrityError for any other file."""
    found: dict[str, Scheme] = {}

    def expected(text: bytes) -> tuple[bytes, Any]:
        data, wanted = json.loads(text), json.loads(plan.SPEC)
        rules = data["quant"]["rules"]
        data["quant"]["rules"] = wanted["quant"]["rules"] = []
        if data != wanted:
            raise ValueError("it is of another model")
        for rule in rules:
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in rule.items() if k != "match"}
            found[rule["match"]] = plan.SCHEMES[rule["scheme"]](**settings)
        if list(found) != list(plan.BASE):
            raise ValueError("it has other parameters")
        return interface(found), layout(found, SHAPES)

    tensors = read_artifact(path, expected).tensors
    return found, tensors


def interface(schemes: Mapping[str, Scheme]) -> bytes:
    """What binds a weights file to the model."""
    params: Any = SimpleNamespace(params=plan.PARAMS[plan.TARGETS[0]])
    return interface_digest(params, {name: storage_name(scheme) for name, scheme in schemes.items()})


def module(target: str, plain: bool = False) -> nn.Module:
    """The generated model, f32, not yet filled; `plain` is the one without fused groups."""
    made: nn.Module = importlib.import_module(f"{_package()}.{target}{'_plain' if plain else ''}.model").Model()
    return made


def folder(target: str) -> Path:
    """Where a target's sources lie."""
    return Path(__file__).with_name(target)


def _package() -> str:
    return __name__.rpartition(".")[0]


def initialize(model: nn.Module) -> None:
    """As specc: every parameter from a generator of its own."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            way, value = plan.INITS[name]
            digest = hashlib.sha256(f"{plan.TRAIN.seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            values = torch.empty(parameter.shape)
            START[way](values, value, generator)
            parameter.copy_(values)


START: Mapping[str, Callable[[Tensor, float, torch.Generator], Any]] = {
    "normal": lambda tensor, value, generator: nn.init.normal_(tensor, 0.0, value, generator=generator),
    "uniform": lambda tensor, value, generator: nn.init.uniform_(tensor, -value, value, generator=generator),
    "orthogonal": lambda tensor, value, generator: nn.init.orthogonal_(tensor, value, generator=generator),
    "constant": lambda tensor, value, generator: nn.init.constant_(tensor, value),
}


def filled(model: nn.Module, weights: Mapping[str, Tensor], device: torch.device, target: str) -> nn.Module:
    """The model with `weights`, in the dtypes of its target, on the device, in eval mode."""
    kinds = {param.name: DTYPES[param.dtype] for param in plan.PARAMS[target]}
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].to(device).to(kinds[name])
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return model.eval()


def _say(world: World, line: str) -> None:
    if not world.rank:
        print(line, flush=True)
