"""Exports a program of a run as a torch.export graph of ATen operations. Compares the graph with the model of the run.

All formats that contain a graph use this module. The code is generated for the CPU target in f32, without fusion.
"""

import logging
import math
import random
import re
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional as F

from specc.compiler.build import exported_files
from specc.compiler.pipeline import run as passed
from specc.compiler.programs.programs import Programs
from specc.compiler.spec.spec import Spec
from specc.runtime.errors import ExportError, IntegrityError
from specc.runtime.export.format import ExportRequest
from specc.runtime.log import Say
from specc.runtime.model.guards import Unchecked
from specc.runtime.model.load import import_model
from specc.runtime.model.parameters import assign
from specc.runtime.open_model import as_trained, read_verified, realize
from specc.runtime.storage.quantized_run import quantized_artifact
from specc.runtime.storage.run_directory import Run

ProgramName = Literal["logits", "score"]
Call = Callable[[Mapping[str, Tensor]], Tensor]  # a function that maps the inputs of a program, by name, to its output

TARGET = "cpu"
BATCHES = 64
TOLERANCE = 1e-4  # the maximum difference of logits, of nats, and of bits per token, for models in f32
LOOSER = {"bf16": 100.0, "f16": 20.0}  # the multiples of TOLERANCE for models that compute in other dtypes
# The maximum numbers of rows and tokens of a compared batch. One batch is a single row as long as the context.
ROWS, TOKENS = 4, 2048
# The lower bounds to try. torch.export specializes on the lengths 0 and 1, and some programs contain the length minus
# one
LOWER_BOUNDS = (1, 2, 3)
GENERATED_OPS = "specc_generated"  # the prefix of the namespaces of custom ops in generated code


@dataclass(frozen=True)
class ProgramExport:
    """An exported program of a run.

    Attributes:
        spec: the spec of the model.
        name: the name of the program.
        inputs: the names of the inputs of the program. Each input is a tensor i64 [batch, tokens].
        graph: the exported program, with ATen operations only. Its input sizes are dynamic.
        least: the smallest number of tokens that the graph accepts.
        most: the largest number of tokens that the graph accepts, which is the context of the model.
        reference: runs the program as generated Torch code without fused kernels. Its outputs are the reference for the
            outputs of the exported file.
        score: runs the program `score` with fused kernels on the CPU, as `specc eval` does.
        tolerance: the largest allowed difference between outputs, and between mean losses in bits per token.
        about: the metadata of the exported file, by name.
    """

    spec: Spec
    name: ProgramName
    inputs: tuple[str, ...]
    graph: ExportedProgram
    least: int
    most: int
    reference: Call
    score: Call
    tolerance: float
    about: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The differences between the outputs of an exported file and the outputs of the model.

    Attributes:
        batches: the number of compared batches. The batches have random ids and various sizes.
        largest: the largest difference between outputs.
        bits: the difference between the mean losses in bits per token. The difference in bits per byte is at most this
            large.
    """

    batches: int
    largest: float
    bits: float

    def line(self) -> str:
        return (
            f"compared on {self.batches} batches: outputs differ by at most {self.largest:.1e}, "
            f"bits per token by {self.bits:.1e}"
        )


def export_program(request: ExportRequest, run: Run) -> ProgramExport:
    """Exports a program of a run.

    The options of the request are `program` ("logits" by default, or "score") and `quantized`. With `quantized`, the
    weights are the dequantized weights of the artifact of the run. Otherwise, the weights are the trained weights.

    Raises:
        ExportError (exit code 2): if the program of this model cannot be exported. The message states the reason.
        RunFailure (4): if the run has no checkpoint, or is not quantized.
        IntegrityError (5): if the run is damaged.
    """
    name: ProgramName = request.options.get("program", "logits")
    trained, weights, about = _weights(run, bool(request.options.get("quantized")), request.say)
    trained = trained.model_copy(update={"targets": (TARGET,)})
    spec = trained.at_rest
    try:
        files, programs = exported_files(spec, TARGET), passed(spec, TARGET, form="exported")
    except ValueError as error:
        hint = "export the weights with --format safetensors, or the model with --format artifact"
        raise ExportError(f"{spec.name} cannot be exported as a graph: {error}", hint) from None
    needed = {param.name for param in programs.params}
    model = _module(files, {key: value for key, value in weights.items() if key in needed})
    inputs = tuple(entry for entry, _ in programs.program(name).inputs)
    graph, least = _graph(_Program(model, name), spec, programs)
    fused = realize(trained, TARGET, None, weights).model
    return ProgramExport(
        spec=spec,
        name=name,
        inputs=inputs,
        graph=graph,
        least=least,
        most=programs.context or spec.model.window,
        reference=lambda given: _Program(model, name)(*(given[key] for key in inputs)),
        score=lambda given: Unchecked(fused).score(*given.values()),
        tolerance=TOLERANCE * LOOSER.get(programs.params[0].dtype, 1.0),
        about={"name": spec.name, "program": name, "spec_digest": run.spec_digest, **about},
    )


def compare(export: ProgramExport, call: Call, say: Say) -> Agreement:
    """Compares an exported file with the model of the run, on batches of various sizes.

    The outputs of the file are compared with the outputs of `export.reference`. The loss of the file is compared with
    the loss of `export.score`.

    Args:
        export: the program.
        call: runs the program in the exported file.
        say: the function that receives the result as a message.

    Raises:
        IntegrityError: if outputs or losses differ by more than `export.tolerance`, or the file cannot be run.
    """
    nats, expected, tokens = 0.0, 0.0, 0
    differences: list[Tensor] = []
    with torch.no_grad():
        for batch in islice(_batches(export), BATCHES):
            given = {key: batch[key] for key in export.inputs}
            try:
                output = call(given)
            except Exception as error:
                shape = ", ".join(f"{key} {list(value.shape)}" for key, value in given.items())
                message = f"the exported program does not run for {shape}: {str(error).splitlines()[0]}"
                raise IntegrityError(
                    message, "this is a bug in specc; export with --format safetensors instead"
                ) from error
            wanted, truth = export.reference(given), export.score(batch)
            if output.shape != wanted.shape or output.dtype != wanted.dtype:
                reference = f"{wanted.dtype} {list(wanted.shape)}"
                raise IntegrityError(
                    f"the exported program returns {output.dtype} {list(output.shape)}, not {reference}",
                    "this is a bug in specc; export with --format safetensors instead",
                )
            differences.append((output - wanted).abs().max())
            counted = truth != 0  # padding of lines has no loss
            targets = list(batch.values())[-1]
            loss = output if export.name == "score" else F.cross_entropy(output.mT, targets, reduction="none")
            nats += float((loss * counted).double().sum())
            expected += float(truth.double().sum())
            tokens += int(counted.sum())
    largest = float(torch.stack(differences).max())  # if any difference is NaN, the maximum is NaN
    agreement = Agreement(BATCHES, largest, abs(nats - expected) / max(tokens, 1) / math.log(2))
    if not (largest <= export.tolerance and agreement.bits <= export.tolerance):
        raise IntegrityError(f"{export.spec.name}: the outputs of the exported program differ: {agreement.line()}")
    say(agreement.line())
    return agreement


def describe(export: ProgramExport) -> str:
    """Returns a line for the user that states the inputs and the output of a program."""
    inputs = ", ".join(f"{name} i64[batch, tokens]" for name in export.inputs)
    output = "f32[batch, tokens, vocabulary]" if export.name == "logits" else "nats f32[batch, tokens]"
    return f"program {export.name}: {inputs} -> {output}; {export.least} to {export.most:,} tokens, any batch"


def _weights(run: Run, quantized: bool, say: Say) -> tuple[Spec, dict[str, Tensor], dict[str, str]]:
    if quantized:
        source = quantized_artifact(run, say)
        artifact = read_verified(source)
        say(f"the weights are the dequantized weights of {source}, in f32; products are computed in floats")
        return artifact.spec, artifact.weights, {"weights": "dequantized"}
    run, weights, step = as_trained(run, say)
    if run.quantized.is_dir():
        say("the weights are the trained weights; with --quantized, they are the dequantized weights of the artifact")
    return run.spec, weights, {"weights": "trained", "step": str(step)}


def _module(files: Mapping[str, str], weights: Mapping[str, Tensor]) -> nn.Module:
    folder = Path(tempfile.mkdtemp(prefix="specc-"))
    try:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        model: nn.Module = import_model(folder).Model()
        assign(model, weights)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model.eval().requires_grad_(False)


class _Program(nn.Module):
    """A module whose `forward` runs one program of a model, for torch.export."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = getattr(self.model, self.name)(*inputs)
        return output


def _graph(program: "_Program", spec: Spec, programs: Programs) -> tuple[ExportedProgram, int]:
    """Exports a program with dynamic sizes. Returns the graph, and the smallest number of tokens that the graph
    accepts.

    Raises ExportError if torch.export fails for all lower bounds. The message states the reason that torch.export
    gives.
    """
    most = programs.context or spec.model.window
    graph = programs.program(program.name)
    lengths = {type.shape[1] for _, type in graph.inputs}  # the names of the dimensions: T, and S for a source
    rows = Dim("batch", min=1, max=2**20)
    reason = ""
    for least in LOWER_BOUNDS:
        if least > most:
            break
        dims = {name: Dim({"T": "tokens", "S": "source_tokens"}[str(name)], min=least, max=most) for name in lengths}
        sizes = {name: min(most, least + 7 + 2 * i) for i, name in enumerate(sorted(map(str, lengths)))}
        example = tuple(torch.ones(3, sizes[str(type.shape[1])], dtype=torch.int64) for _, type in graph.inputs)
        shapes = tuple({0: rows, 1: dims[type.shape[1]]} for _, type in graph.inputs)
        try:
            with torch.no_grad(), quiet():
                exported = torch.export.export(program, example, dynamic_shapes=(shapes,), strict=False)
                exported = exported.run_decompositions(_decompositions(exported))
        except Exception as error:  # torch.export raises many types of exceptions
            reason = _reason(error)
            continue
        unknown = sorted(
            {
                node.target.namespace
                for node in exported.graph.nodes
                if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten"
            }
        )
        if unknown:
            raise ExportError(f"{spec.name} cannot be exported: its graph needs operations of {', '.join(unknown)}")
        for node in exported.graph.nodes:
            for key in ("stack_trace", "source_fn_stack", "nn_module_stack"):  # they contain paths of this machine
                node.meta.pop(key, None)
        return exported, least
    raise ExportError(
        f"{spec.name} cannot be exported as a graph with dynamic sizes: {reason}",
        "export the weights with --format safetensors, or the model with --format artifact",
    )


def _decompositions(exported: ExportedProgram) -> dict[Any, Callable[..., Any]]:
    """Maps each custom op of generated code to a Python function that torch.export can trace.

    Without these functions, the exported file would contain custom ops, and could not run without the generated code.
    """
    from torch._library.custom_ops import OPDEFS  # Torch has no public access to the Python function of an op

    targets = {node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    return {
        target: OPDEFS[target._schema.name]._init_fn
        for target in targets
        if target.namespace.startswith(GENERATED_OPS) and target._schema.name in OPDEFS
    }


def _reason(error: Exception) -> str:
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    return re.sub(r"For more information.*", "", " ".join(lines[:2])).strip() or type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """A context manager that hides deprecation warnings of torch, and its notes about missing optional packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _batches(export: ProgramExport) -> Iterator[dict[str, Tensor]]:
    from specc.compiler.passes.logits import SCORE

    programs = passed(export.spec, TARGET, form="exported")
    inputs = programs.program(SCORE).inputs
    names = sorted({str(type.shape[1]) for _, type in inputs})
    chooser = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    least = max(export.least, export.spec.model.unscored + 1)
    sizes = [(1, dict.fromkeys(names, least)), (1, dict.fromkeys(names, export.most))]
    while True:
        lengths = {name: chooser.randint(least, export.most) for name in names}
        most = max(1, min(ROWS, TOKENS // max(lengths.values())))
        rows, lengths = sizes.pop(0) if sizes else (chooser.randint(1, most), lengths)
        yield {
            key: torch.randint(export.spec.model.vocabulary, (rows, lengths[str(type.shape[1])]), generator=generator)
            for key, type in inputs
        }
