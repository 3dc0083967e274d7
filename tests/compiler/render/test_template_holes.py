"""Templates whose context lacks a value: each access of each template fails in turn, and every branch is rendered.

The templates are instrumented as they are parsed: each read of a name or attribute, and each branch, calls a function
with its number. A read that is removed has the value of a name that the context lacks.
"""

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pytest
from cached_sites import CASES as CACHED
from decoding_sites import ROW_CASES, rope_site, row_site
from epilogue_sites import FORMS as CODES
from epilogue_sites import codes_site, dropout_site
from head_sites import PARTS, head_site
from int8_sites import CASES as INT8
from int8_sites import int8_site
from jinja2 import nodes
from kernel_sites import written
from random_sites import KERNELS, random_site
from run_samples import small_spec
from scored_sites import Attention
from step_sites import step_site
from tiers import Trials, tiers
from tiny_models import tiny

from specc.compiler import kernels
from specc.compiler.build import compile_loaded
from specc.compiler.catalog import catalog
from specc.compiler.kernels.attention.cached_torch import TorchCalls
from specc.compiler.kernels.kernel import Kernel, missing
from specc.compiler.plan.lock import lock_path, read_lock
from specc.compiler.render import jinja
from specc.compiler.render.jinja import TemplateFault
from specc.compiler.spec.check import load
from specc.compiler.targets import TARGETS

ROOT = Path(__file__).parents[3]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
NODES = 32  # random nodes for each kernel
CALLS = "leaky_relu(s, 0.1) - slope(h) * (i - j)"  # a score that calls a function of torch.nn.functional
# What no committed spec has: a score of every attention, and a loss in chunks.
SMALL = (
    *(tiny(({"kind": "attention", "heads": 2, "score": score},), ()) for score in ("s - slope(h) * (i - j)", CALLS)),
    small_spec("fuse=[{head: [logits, softcap, loss], chunks: 4}]"),
)
# Nodes that no random node is: packed weights, 8-bit codes, dropout in epilogues, gradients in a part of a tensor, int8
# products, 16-bit states of an LSTM, and functions that few expressions call.
OTHERS = [
    site
    for target in ("cpu", "sm90", "sm80")
    for site in (
        *(codes_site(form, True, target, 128, 64, "f32" if target == "cpu" else "bf16") for form in CODES),
        *(dropout_site(form, target, 128, 64, "f32" if target == "cpu" else "bf16") for form in ("added", "twice")),
        *(head_site(part, (4, 64, 32), True, target, "f32", into=(16, 8)) for part in PARTS),
        rope_site(coded=True, target=target, cached="bf16", dtype="bf16"),
        *(row_site(case, target, "f32" if target == "cpu" else "bf16", packed=True) for case in ROW_CASES.values()),
        row_site(((24,), 32, None, (("tanh(p)",), ("p",), ())), target, "f32" if target == "cpu" else "bf16"),
        *(int8_site(case, 64, 64, target) for case in INT8),
        step_site(64, target, "bf16"),
        *(Attention(CALLS).site((4, 4, 64), backward, "bf16", target) for backward in (False, True)),
        *(CACHED[case].site("bf16", target) for case in ("latent", "pages, latent codes")),
    )
]
Place = tuple[str, int, str]  # template, line, text
Rendering = Callable[[], str]


@dataclass
class Probe:
    """The reads and branches of all templates, and the first rendering that came to each."""

    reads: list[Place] = field(default_factory=list)
    branches: list[Place] = field(default_factory=list)
    read_by: dict[int, Rendering] = field(default_factory=dict)
    rendered: set[int] = field(default_factory=set)
    removed: int | None = None
    rendering: Rendering | None = None

    def read(self, number: int, value: Any) -> Any:
        if self.removed == number:
            return jinja2.StrictUndefined(name=self.reads[number][2])
        if self.rendering is not None:
            self.read_by.setdefault(number, self.rendering)
        return value

    def branch(self, number: int, value: Any = "") -> Any:
        self.rendered.add(number)
        return value

    def instrument(self, node: nodes.Node, template: str) -> nodes.Node:
        """Adds the calls to a tree, which it changes."""
        passed = node.args if isinstance(node, nodes.Call) else []  # a macro reads them where it prints them
        for name, value in list(node.iter_fields()):
            if value is passed:
                continue
            if isinstance(value, nodes.Node):
                setattr(node, name, self.instrument(value, template))
            elif isinstance(value, list):
                value[:] = [self.instrument(v, template) if isinstance(v, nodes.Node) else v for v in value]
        if isinstance(node, nodes.If):
            self._branch(node.body, node, template, "if")
            self._branch(node.else_, node, template, "else")
        elif isinstance(node, nodes.For):
            self._branch(node.body, node, template, "for")
        elif isinstance(node, nodes.CondExpr):
            node.expr1 = self._call("branch_", self.branches, (template, node.lineno, "then"), node.expr1)
            if node.expr2 is not None:
                node.expr2 = self._call("branch_", self.branches, (template, node.lineno, "else"), node.expr2)
        elif isinstance(node, nodes.Getattr) and node.ctx == "load":
            return self._call("read_", self.reads, (template, node.lineno, node.attr), node)
        elif isinstance(node, nodes.Name) and node.ctx == "load":
            return self._call("read_", self.reads, (template, node.lineno, node.name), node)
        return node

    def _call(self, function: str, places: list[Place], place: Place, *values: nodes.Expr) -> nodes.Call:
        places.append(place)
        arguments = [nodes.Const(len(places) - 1, lineno=place[1]), *values]
        return nodes.Call(nodes.Name(function, "load", lineno=place[1]), arguments, [], None, None, lineno=place[1])

    def _branch(self, body: list[nodes.Node], node: nodes.Node, template: str, name: str) -> None:
        line = body[0].lineno if body else node.lineno
        body.insert(0, nodes.Output([self._call("branch_", self.branches, (template, line, name))], lineno=line))


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    """A probe that has rendered all files of all committed specs, and of every kernel for random nodes."""
    probe, real, render = Probe(), jinja2.Environment._parse, jinja.render

    def parsed(self: jinja2.Environment, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = real(self, source, name, filename)
        assert name is not None
        probe.instrument(tree, name)
        return tree

    def rendered(template: str, context: object, source: str, key: str, known: Collection[str] = ()) -> str:
        probe.rendering = lambda: render(template, context, source, key, known)
        return probe.rendering()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "_parse", parsed)
        patch.setattr(jinja, "render", rendered)
        jinja.environment.cache_clear()
        jinja.environment().globals |= {"read_": probe.read, "branch_": probe.branch}
        for path in SPECS:
            spec, source = load(path)
            compile_loaded(spec, source, (), read_lock(lock_path(path, spec.name)))
        for spec in SMALL:
            compile_loaded(spec, None)
        for kernel in KERNELS.values():
            rng = random.Random(f"{kernel.name} 5")  # nodes of a kernel do not depend on other kernels
            targets = [name for name, target in TARGETS.items() if not missing(kernel, target)]
            for number in range(NODES):
                target = rng.choice(targets)
                site = random_site(kernel, rng, target, "bf16", "f16", "f32")
                if site is not None:
                    for tile in (kernel, *rng.sample(kernel.variants(site), min(1, len(kernel.variants(site))))):
                        written(tile, site, tmp_path_factory.getbasetemp() / f"{kernel.name}_{number}")
        for kernel in catalog(kernels, Kernel).values():
            for number, site in enumerate([] if isinstance(kernel, TorchCalls) else OTHERS):
                computes = isinstance(site.node.op, kernel.computes) and not missing(kernel, site.target)
                if computes and kernel.rejects(site) is None:
                    written(kernel, site, tmp_path_factory.getbasetemp() / f"other_{kernel.name}_{number}")
        probe.rendering = None
        yield probe
    jinja.environment.cache_clear()


@tiers("C5", removed_reads_of_each_template=(3, 1_000))
def test_a_template_fails_without_any_of_its_values(trials: Trials, probe: Probe) -> None:
    rng = random.Random(5)
    of: dict[str, list[int]] = {}
    for number in probe.read_by:
        of.setdefault(probe.reads[number][0], []).append(number)
    assert len(of) > 45
    holes = []
    for numbers in of.values():
        for number in rng.sample(numbers, min(len(numbers), trials["removed_reads_of_each_template"])):
            probe.removed = number
            try:
                probe.read_by[number]()
                holes.append(probe.reads[number])
            except TemplateFault:
                pass
            finally:
                probe.removed = None
    assert holes == []


def test_every_branch_of_every_template_is_rendered(probe: Probe) -> None:
    missed = {place for number, place in enumerate(probe.branches) if number not in probe.rendered}
    assert not missed, "\n".join(map(str, sorted(missed)))
