"""Small models for tests: specs from a few words, modules in float64 beside their reference, random parameters."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.passes.count_dropout import SUFFIX, count_dropout
from specc.compiler.plan.lock import NO_LOCK, Lock
from specc.compiler.programs import reference
from specc.compiler.programs.programs import Programs
from specc.compiler.spec.check import load
from specc.compiler.spec.migrate import migrate
from specc.compiler.spec.spec import Spec
from specc.runtime.model.load import instantiate

ATTENTION: dict[str, Any] = {"kind": "attention", "heads": 2}
MLP: dict[str, Any] = {"kind": "mlp", "hidden": 12, "act": "relu(x) ** 2"}
FUSE_MLP: dict[str, Any] = {"blocks.*.mlp": ["up", "act", "down"]}
TRAIN: dict[str, Any] = {
    "micro_batch": 2,
    "data": {"tokenizer": "eleven.model"},
    "steps": 2,
    "optimizers": [{"kind": "adamw", "match": "*", "lr": 0.01}],
}


def version_2(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a spec, with the block options of version 1 rewritten."""
    data = copy.deepcopy(data)
    migrate(data)
    return data


def spec_data(
    layers: Sequence[Mapping[str, Any]] = (ATTENTION, MLP),
    fuse: Sequence[Mapping[str, Any]] = (FUSE_MLP,),
    targets: Sequence[str] = ("cpu",),
    count: int = 2,
    blocks: Mapping[str, Any] | None = None,
    name: str = "tiny",
    **model: Any,
) -> dict[str, Any]:
    """A spec of 11 tokens, 8 features, 12 positions, as the data of its YAML file; `model` are more of its keys."""
    stack = {"count": count, "layers": list(layers), **(blocks or {})}
    start = {"kind": "decoder", "vocab": 11, "dim": 8, "context": 12, "embed": [{"kind": "token"}], "blocks": stack}
    shape = {**start, **model}
    return version_2(
        {
            "spec_version": 1,
            "name": name,
            "targets": list(targets),
            "model": shape,
            "fuse": list(fuse),
            "train": {**TRAIN, "tokens_per_step": 2 * shape["context"]},
        }
    )


def spec_of(data: Mapping[str, Any]) -> Spec:
    """The checked spec; JSON is YAML."""
    return load(json.dumps(data))[0]


def tiny(*args: Any, **words: Any) -> Spec:
    """The spec of `spec_data`."""
    return spec_of(spec_data(*args, **words))


@contextmanager
def float64() -> Iterator[None]:
    """New tensors are float64, so that generated code that is `.double()` has nothing of less precision in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def random_params(programs: Programs, seed: int) -> dict[str, Tensor]:
    """A float64 value for every parameter that leaves no path at zero."""
    generator = torch.Generator().manual_seed(seed)
    results = {}
    for param in programs.params:
        spread = 1.0 if len(param.shape) < 2 else param.shape[-1] ** -0.5
        results[param.name] = spread * torch.randn(param.shape, generator=generator, dtype=torch.float64)
    return results


@dataclass(frozen=True)
class Pair:
    """A generated module in float64 with the parameters that its reference also has."""

    spec: Spec
    programs: Programs
    model: Any
    params: dict[str, Tensor]

    def batch(self, seed: int = 1) -> tuple[Tensor, Tensor]:
        """ids and targets, 2 rows of the context."""
        generator = torch.Generator().manual_seed(seed)
        shape = (2, self.spec.model.window)
        ids = torch.randint(self.spec.model.vocabulary, shape, generator=generator)
        return ids, torch.randint(self.spec.model.vocabulary, shape, generator=generator)

    def reference(self, program: str, **inputs: Tensor) -> dict[str, Tensor]:
        """The outputs of the unfused program, by plain references, with the dropout masks of the module."""
        plain = count_dropout(pipeline.lower(self.spec.plain, "cpu"), self.spec.model.reads != "lines")
        draws = {name: buffer for name, buffer in self.model.named_buffers() if name.endswith(SUFFIX)}
        return reference.run(plain, program, inputs, {**self.params, **draws})


def pair(spec: Spec, folder: Path, fuse: bool = True, seed: int = 0, lock: Lock = NO_LOCK) -> Pair:
    """Builds `spec` for the CPU under `folder`, as `lock` says, and fills it."""
    loaded = instantiate(spec, "cpu", folder / ("fused" if fuse else "plain"), fuse, lock)
    params = random_params(loaded.programs, seed)
    model = loaded.model.double()
    state = dict(model.named_parameters())
    assert state.keys() == params.keys()
    with torch.no_grad():
        for name, value in params.items():
            assert state[name].shape == value.shape
            state[name].copy_(value)
    return Pair(spec, loaded.programs, model, {name: value.requires_grad_() for name, value in params.items()})
