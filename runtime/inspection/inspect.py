"""`specc inspect`: measures the weights and activations of a trained run.

A part of the inspection, such as `experts`, may apply only to some kinds of model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler.ir.graph import Node
from specc.compiler.passes.assign_quant import reused
from specc.compiler.pipeline import lower
from specc.compiler.programs import reference
from specc.compiler.programs.programs import Programs, flatten
from specc.compiler.spec.spec import Calibrate
from specc.runtime.calibration.calibrate import calibration_windows
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.eval.text import evaluate_text
from specc.runtime.inspection.experts import ExpertLoad, expert_loads_by_kind
from specc.runtime.inspection.heads import Head, HeadPatterns, repeated_tokens
from specc.runtime.inspection.norms import BlockNorm, ResidualNorms
from specc.runtime.inspection.ranks import RankUse, is_matrix, rank_uses
from specc.runtime.inspection.sensitivity import Sensitivity, schemes_at, sensitivities
from specc.runtime.inspection.units import UnitActivity, Units
from specc.runtime.log import Say
from specc.runtime.metrics.expert_load import expert_loads
from specc.runtime.open_model import OpenedModel, as_trained, data_of, opened_run, realize
from specc.runtime.quantize.assignment import base_schemes
from specc.runtime.quantize.quantizer import Quantizer
from specc.runtime.quantize.weights import statistics_of
from specc.runtime.storage.run_directory import Run
from specc.runtime.train.sources.source import source_of

PARTS = ("ranks", "heads", "units", "norms", "experts", "sensitivity")
VALIDATION = "validation split"  # the kind of the documents if the user names no kind
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """The options of an inspection.

    Attributes:
        parts: the parts of the inspection to measure, which are entries of `PARTS`.
        bits: the numbers of bits at which the sensitivity to quantization is measured; empty for the bits in the spec.
        top: how many of the largest singular values the reported energy includes. None for a tenth of all values.
        sequences: the number of rows of text on which heads, units and norms are measured.
        window: the length of each row of text in tokens, at most the context.
        max_tokens: the number of tokens of the validation split on which the sensitivity is measured.
        data: the data, in the format of `specc train --data`; None for the data of the run.
        target: a target of the spec. None selects the best target that this machine can run.
        search: folders to search for the tokenizer.
        cache: the folder for tokenized text; None for the default folder.
        kinds: the data on which the load of experts is measured, by kind of document. If the mapping is empty, `data`
            is the only kind.
    """

    parts: tuple[str, ...] = PARTS
    bits: tuple[int, ...] = ()
    top: int | None = None
    sequences: int = 16
    window: int = 512
    max_tokens: int = 65536
    data: str | None = None
    target: str | None = None
    search: tuple[Path, ...] = ()
    cache: Path | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inspection:
    """The results of an inspection. If a part was not measured, its attribute is empty.

    Attributes:
        name: the name of the spec.
        step: the step of the checkpoint.
        rows: the number and the length in tokens of the rows of text on which heads, units and norms were measured.
        scored: the number of tokens and bytes of the text for the sensitivity, and the bits per byte of the unquantized
            model.
        notes: the reason for each missing result. A key is a part of the inspection, a layer, or a parameter of the
            model.
    """

    name: str
    step: int
    ranks: tuple[RankUse, ...] = ()
    heads: tuple[Head, ...] = ()
    units: tuple[Units, ...] = ()
    norms: tuple[BlockNorm, ...] = ()
    experts: tuple[ExpertLoad, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()
    rows: tuple[int, int] | None = None
    scored: Mapping[str, float] | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        facts = asdict(self)
        facts["heads"] = [asdict(head) | {"type": head.type} for head in self.heads]
        facts["norms"] = [asdict(norm) | {"growth": norm.growth} for norm in self.norms]
        facts["sensitivity"] = [asdict(row) | {"ratio": row.ratio} for row in self.sensitivity]
        return facts


def inspect(path: Path, options: InspectOptions, say: Say, progress: Progress | None = None) -> Inspection:
    """Measures the final weights of a run.

    Args:
        path: the run directory.
        options: the parts to measure, and the data.
        say: the function that receives messages for the user.
        progress: a function called as `progress(stage, done, total)` during the inspection.

    Returns:
        The results of the requested parts.

    Raises:
        RunDirectoryError: if `path` is not a run (exit code 2).
        RunFailure: if the run has no checkpoint, or this machine can run none of its targets (4).
        IntegrityError: if the run is damaged (5).
        DataError: if the data cannot be read.
    """
    run, weights, step = as_trained(Run.open(path), say)
    with ExitStack() as stack:
        work = _Work(run, weights, options, say, progress or (lambda stage, done, total: None), stack)
        result = Inspection(run.spec.name, step)
        if "ranks" in options.parts:
            result = replace(result, ranks=work.ranks())
        if {"heads", "units", "norms"} & set(options.parts):
            result = work.activations(result)
        if "experts" in options.parts:
            result = replace(result, experts=work.experts())
        if "sensitivity" in options.parts:
            result = work.sensitivity(result)
        return replace(result, notes=work.notes)


@dataclass
class _Work:
    """Measures the parts of one inspection, and collects the reasons for missing results."""

    run: Run
    weights: Mapping[str, Tensor]
    options: InspectOptions
    say: Say
    progress: Progress
    stack: ExitStack
    notes: dict[str, str] = field(default_factory=dict)

    @cached_property
    def opened(self) -> OpenedModel:
        return opened_run(self.run, self.weights, self.options.target, None, self.options.search)

    @cached_property
    def programs(self) -> Programs:
        return lower(self.run.spec.at_rest, self.opened.loaded.target.name)

    @cached_property
    def on_device(self) -> dict[str, Tensor]:
        names = [parameter.name for parameter in self.programs.params]
        return {name: self.weights[name].to(self.opened.device) for name in names}

    @property
    def is_text(self) -> bool:
        return self.run.spec.model.reads == "text"

    def ranks(self) -> tuple[RankUse, ...]:
        matrices = {name: tensor for name, tensor in self.on_device.items() if is_matrix(tuple(tensor.shape))}
        uses: list[RankUse] = []
        for done, (name, tensor) in enumerate(matrices.items(), 1):
            uses += rank_uses(name, tensor, self.options.top)
            self.progress("ranks", done, len(matrices))
        return tuple(uses)

    def activations(self, result: Inspection) -> Inspection:
        """Returns `result` with heads, units and norms added.

        The method runs the model on rows of text. For heads, it also runs the model on repeated random tokens.
        """
        graph = flatten(self.programs, self.programs.program("score"))
        heads, units, norms = HeadPatterns(graph), UnitActivity(graph), ResidualNorms(graph)
        parts = {"heads": heads.observe, "units": units.observe, "norms": norms.observe}
        observers = [observe for part, observe in parts.items() if part in self.options.parts]

        def observe(node: Node, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
            for observer in observers:
                observer(node, inputs, outputs)

        rows = length = 0
        for batch in self._batches():
            self._run(batch, observe)
            some = next(iter(batch.values()))
            rows, length = rows + len(some), some.shape[1]
            self.progress("text", rows, self.options.sequences)
        if "heads" in self.options.parts:
            if self.is_text:
                self._repeated(heads)
            else:
                self.notes["induction"] = "not measured: the model reads lines of a task, not random tokens"
            self.notes |= {name: f"no types of heads: {reason}" for name, reason in heads.refused.items()}
            result = replace(result, heads=heads.heads())
            if not result.heads:
                self.notes["heads"] = "the model has no self-attention for which types of heads are defined"
        if "units" in self.options.parts:
            result = replace(result, units=tuple(units.layers()))
            if not result.units:
                self.notes["units"] = "the model has no pointwise activation between two products"
            for layer in (row.layer for row in result.units if not row.tokens):
                self.notes[layer] = "no token was routed to this expert"
        if "norms" in self.options.parts:
            result = replace(result, norms=tuple(norms.blocks()))
            self.notes |= {block: f"no norms: {reason}" for block, reason in norms.refused.items()}
            if not result.norms:
                self.notes["norms"] = "the model has no sequence of blocks with a residual stream"
        return replace(result, rows=(rows, length))

    def _run(self, batch: Mapping[str, Tensor], observe: reference.Observe) -> None:
        inputs = {name: ids.to(self.opened.device) for name, ids in batch.items()}
        with torch.no_grad():
            reference.run(self.programs, "score", inputs, self.on_device, observe)

    def _batches(self) -> Iterator[Mapping[str, Tensor]]:
        spec, options = self.run.spec, self.options
        if not self.is_text:
            data = source_of(spec)(spec, self.opened.search).open(*data_of(self.run, self.options), self.stack)
            yield from data.calibration(options.sequences, 2)
            return
        for ids, targets in self._windows(*data_of(self.run, options)):
            yield {"ids": ids, "targets": targets}

    def _windows(self, data: str, cache: Path) -> Iterator[tuple[Tensor, Tensor]]:
        spec, options = self.run.spec, self.options
        settings = Calibrate(sequences=options.sequences, batch=min(2, options.sequences))
        stream = self._stream("val", data, cache)
        window = min(options.window, spec.model.window, stream.tokens - 1)
        yield from calibration_windows(stream, settings, window, spec.train.seed)

    def experts(self) -> tuple[ExpertLoad, ...]:
        """Returns the load of each expert on each kind of document; empty if the model has no experts."""
        data, cache = data_of(self.run, self.options)
        model: Any = self.opened.model
        score, device = model.score, self.opened.device
        measured: dict[str, list[dict[str, list[float]]]] = {}
        if self.is_text and any(parameter.dim() == 3 for parameter in model.parameters()):
            for kind, path in (self.options.kinds or {VALIDATION: data}).items():
                measured[kind] = loads = []
                for ids, targets in self._windows(path, cache):
                    loads.append(expert_loads(model, score, ids.to(device), targets.to(device)))
                    self.progress(f"experts, {kind}", 2 * len(loads), self.options.sequences)
        loads_by_kind = tuple(expert_loads_by_kind(measured))
        if self.options.kinds and not loads_by_kind:
            self.notes["experts"] = "the model has no mixture of experts"
        return loads_by_kind

    def _repeated(self, heads: HeadPatterns) -> None:
        spec = self.run.spec
        length = min(self.options.window, spec.model.window) // 2
        if length < 2:
            self.notes["induction"] = "not measured: the context is too short for a repetition"
            return
        for i in range(0, self.options.sequences, 2):
            ids = repeated_tokens(2, length, spec.model.vocabulary, seed=spec.train.seed + i)
            self._run({"ids": ids, "targets": ids.roll(-1, 1)}, heads.observe_repeated)
            self.progress("repetition", min(i + 2, self.options.sequences), self.options.sequences)

    def sensitivity(self, result: Inspection) -> Inspection:
        """Returns `result` with the sensitivity of each matrix to quantization added."""
        spec, opened = self.run.spec, self.opened
        if not self.is_text:
            self.notes["sensitivity"] = "not measured: the model is not scored in bits per byte"
            return result
        quant = spec.quant
        base = base_schemes(quant, self.programs.params) if quant is not None else {}
        names = [name for name, tensor in self.on_device.items() if is_matrix(tuple(tensor.shape))]
        pairs, refused = schemes_at(base, names, self.options.bits, self.on_device)
        calibrate = quant.calibrate if quant is not None else Calibrate()
        target = opened.loaded.target.name
        unfused = realize(spec.at_rest, target, None, self.on_device, fuse=False).model
        data, cache = data_of(self.run, self.options)
        train = self._stream("train", data, cache)
        windows = partial(calibration_windows, train, calibrate, spec.model.window, spec.train.seed)
        solved = reused(self.programs) & {name for name, scheme in pairs if scheme.needs_hessian}
        sequences = calibrate.sequences
        statistics = statistics_of(unfused, windows, opened.device, solved, self.progress, sequences, rises=True)
        quantizer = Quantizer(self.on_device, statistics)
        settings = EvaluateOptions(data, max_tokens=self.options.max_tokens, cache=cache, compiled=False)
        measure = partial(evaluate_text, opened, settings)
        rows: list[Sensitivity] = []
        for row in sensitivities(opened.model, quantizer, pairs, measure, refused):
            rows.append(row)
            self.progress("sensitivity", len(rows), len(pairs))
        self.notes.update(refused)
        score = measure()
        scored = {"tokens": score.tokens, "bytes": score.piece_bytes, "bpb": score.bpb or score.bpb_pieces}
        return replace(result, sensitivity=tuple(rows), scored=scored)

    def _stream(self, split: str, data: str, cache: Path) -> TokenStream:
        stream = open_stream(data, split, self.opened.tokenizer, cache)  # type: ignore[arg-type]
        self.stack.callback(stream.close)
        return stream
