"""Calls one candidate: on inputs that show whether it is right, and on inputs of the real size for its time."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler import reference
from specc.compiler.kernels.kernel import Site
from specc.runtime.bench.accuracy import poisoned, upcast
from specc.runtime.bench.operands import DTYPES
from specc.runtime.load import import_file
from specc.runtime.verify import PEAK, RMS, ROUNDINGS

CHECKED = {"B": 3, "T": 343, "S": 343}  # their product is no multiple of any tile
TINY = {"B": 1, "T": 8, "S": 8}
REPEATS = 100
TINIEST = 1e-30  # where reference and chain are both exactly 0


def loaded(folder: Path, module: str, function: str) -> Callable[..., Any]:
    """The function of a rendered kernel."""
    call: Callable[..., Any] = vars(import_file(folder, module))[function]
    return call


def inputs_of(site: Site, sizes: Mapping[str, int], seed: int = 0) -> list[Tensor]:
    """Random inputs where symbols have `sizes`: normal numbers, weights scaled so that products are about 1, whole
    numbers that the op can take. Where operands have a domain, as sqrt(y) has, they are made
    positive."""
    made = _random(site, sizes, seed)
    if not any(value.isnan().any() for value in reference.node_value(site.node, _random(site, TINY, seed))):
        return made
    arity = site.node.op.arity
    return [*made[:arity], *(operand.abs() for operand in made[arity:])]


def _random(site: Site, sizes: Mapping[str, int], seed: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    made: list[Tensor] = []
    for type in site.inputs:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in type.shape]
        dtype, known = DTYPES[type.dtype], all(isinstance(dim, int) for dim in type.shape)
        if not dtype.is_floating_point:
            end = site.node.op.ids_below(site.inputs)
            made.append(torch.randint(end, shape, generator=generator, device="cuda").to(dtype))
            continue
        values = torch.randn(shape, generator=generator, device="cuda")
        made.append((values.mul_(shape[-1] ** -0.5) if known and len(shape) > 1 else values).to(dtype))
    return made


@dataclass(frozen=True, slots=True)
class Judge:
    """Holds candidates of one node to float64, on inputs that all of them share. `rms` and `peak` are, an output,
    the errors of plain Torch in the kernel's dtype, op after op."""

    inputs: Sequence[Tensor]
    exact: Sequence[Tensor]
    rms: Sequence[float]
    peak: Sequence[float]

    @classmethod
    def of(cls, site: Site) -> "Judge":
        """For a node, on random inputs."""
        inputs = inputs_of(site, CHECKED, seed=1)
        exact = reference.node_value(site.node, [upcast(value, torch.float64) for value in inputs])  # type: ignore[misc]
        chain = reference.node_value(site.node, inputs)
        rms, peak = [], []
        for have, want in zip(chain, exact, strict=True):
            floor = torch.finfo(have.dtype).eps * want.abs().max().item()
            error = (have.double() - want).abs()
            # which of two chains in f32 is nearer is chance
            close = ROUNDINGS * torch.finfo(torch.float32).eps if have.dtype == torch.float32 else 0.0
            rms.append(max(_rms(error), close * _rms(want), 1e-3 * floor, TINIEST))
            peak.append(max(error.max().item(), close * want.abs().max().item(), 0.5 * floor, TINIEST))
        return cls(inputs, exact, rms, peak)

    def reason(self, call: Callable[..., Any]) -> str | None:
        """Why a candidate must not be used: it is less exact than plain Torch, leaves outputs unwritten, or gives
        other bits when it is called again."""
        with poisoned():
            found = _several(call(*self.inputs))
        for i, (have, want) in enumerate(zip(found, self.exact, strict=True)):
            if have.shape != want.shape:
                return f"output {i} is {list(have.shape)}, not {list(want.shape)}"
            error = (have.double() - want).abs()
            if not bool(error.isfinite().all()):
                return f"output {i} is not all written, or not finite"
            rms = _rms(error) / self.rms[i]
            peak = error.max().item() / self.peak[i]
            if rms > RMS or peak > PEAK:
                return f"output {i} has {rms:.2f}x the RMS error of plain Torch and {peak:.2f}x its largest"
        for _ in range(REPEATS):
            again = _several(call(*self.inputs))
            if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
                return "other bits when it is called again"
        return None


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def _several(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def forget(folder: Path) -> None:
    """Drops the modules that were imported from a folder, and the package that held them."""
    generated = [(name, module) for name, module in sys.modules.items() if name.startswith("specc_generated_")]
    for name, module in generated:
        places = (getattr(module, "__file__", None) or "", *getattr(module, "__path__", ()))
        if any(str(place).startswith(str(folder.resolve())) for place in places):
            del sys.modules[name]
