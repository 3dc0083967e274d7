"""Every kernel of the catalogue on random nodes and shapes: exact, without strays; products of small whole numbers."""

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from fork_server import run_script
from gpus import gpu_target
from kernel_sites import DTYPES, expected, imported, make_site
from random_sites import (
    FEWEST,
    KERNELS,
    Check,
    Place,
    checked,
    inexact,
    random_site,
    random_sizes,
    shapes_of_a_node,
    strays,
)
from scored_sites import CASES as SCORED
from tiers import Trials, soak, tiers
from torch import Tensor

from specc.compiler.ir.graph import Node
from specc.compiler.kernels.attention.scored import SCORED_GRAD
from specc.compiler.kernels.kernel import Kernel, Site, missing, symbol
from specc.compiler.ops.linear import Product
from specc.compiler.programs import reference
from specc.compiler.targets import TARGETS
from specc.runtime.verify.judge import Judge, inputs_of, many

# The interpreter rounds to e4m3 in another way: test_attention_cached.py compares what it can.
TRITON = [name for name, kernel in KERNELS.items() if kernel.language == "triton" and name != "to_codes"]
EXACT = ("relu2", "relu6", "mul", "two_muls", "scaled_residual")  # epilogues of whole numbers that are whole numbers


def wrong(place: Place, check: Check, shapes: int) -> Iterator[str]:
    """Yields what is wrong with any kernel of a target whose package is installed.

    Processes share the nodes of kernels of a GPU, whose compilation takes most of the time. Each node has its own seed.
    """
    names = [
        name
        for name, kernel in KERNELS.items()
        if not missing(kernel, TARGETS[place.target]) and (not kernel.package or find_spec("flash_attn"))
    ]
    if place.device == "cpu":
        yield from chain.from_iterable(checked(place, check, shapes, name) for name in names)
        return
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 1) // 2), get_context("spawn")) as pool:
        works = [
            pool.submit(checked, replace(place, seed=first), check, min(each, shapes - first), name)
            for first in range(0, shapes, FEWEST)
            for name in names
            if first % (each := shapes_of_a_node(KERNELS[name])) == 0
        ]
        for work in works:
            yield from work.result()


@tiers("C10", shapes_of_each_kernel_of_the_cpu=(2, 200))
def test_kernels_of_the_cpu_are_as_exact_as_plain_torch(trials: Trials, tmp_path: Path) -> None:
    assert [*wrong(Place(tmp_path, "cpu"), inexact, trials["shapes_of_each_kernel_of_the_cpu"])] == []


@pytest.mark.gpu
@soak("C10", shapes_of_each_kernel=200)
def test_kernels_are_as_exact_as_plain_torch(trials: Trials, tmp_path: Path) -> None:
    place = Place(tmp_path, gpu_target(), "cuda", ("bf16", "f16", "f32"), 2000)
    problems = [*wrong(place, inexact, trials["shapes_of_each_kernel"])]
    assert not problems, "\n".join(problems)  # pytest cuts a long list


def eager(node: Node, wrong: int | None, *inputs: Tensor) -> list[Tensor]:
    """The outputs of a node by plain Torch; output `wrong` is 1% too large."""
    outputs = reference.node_value(node, list(inputs))
    return [output * 1.01 if i == wrong else output for i, output in enumerate(outputs)]


@pytest.mark.parametrize("name", ["buckets", "documents"])
def test_inexact_outputs_are_found(name: str) -> None:
    site = SCORED[name].site((4, 2, 16), True, "f16")
    judge = Judge.of(site, inputs_of(site, {"B": 2, "T": 33, "S": 33}, "cpu"))
    assert [*inexact(SCORED_GRAD, judge, partial(eager, site.node, None))] == []
    for i, label in enumerate(site.node.op.output_labels):
        (text,) = inexact(SCORED_GRAD, judge, partial(eager, site.node, i))
        assert text.startswith(f"output {label} has")


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_nodes_of_kernels_of_a_gpu_have_references(dtype: str) -> None:
    """In the dtype of the node too, with which kernels are compared."""
    judged = set()
    for name, kernel in KERNELS.items():
        rng = random.Random(f"{name} {dtype}")
        if (site := random_site(kernel, rng, "sm90", dtype)) is not None:
            judge = Judge.of(site, inputs_of(site, random_sizes(site, rng, 130), "cpu"))
            assert all(bool(value.isfinite().all()) for value in judge.exact), name
            judged.add(name)
    assert len(judged) > 5


@tiers("C13", shapes_of_each_kernel_of_the_cpu=(1, 50))
def test_kernels_of_the_cpu_have_no_strays(trials: Trials, tmp_path: Path) -> None:
    assert [*wrong(Place(tmp_path, "cpu"), strays, trials["shapes_of_each_kernel_of_the_cpu"])] == []


@pytest.mark.gpu
@soak("C13", shapes_of_each_kernel=50)
def test_kernels_have_no_strays(trials: Trials, tmp_path: Path) -> None:
    place = Place(tmp_path, gpu_target(), "cuda", ("bf16", "f16", "f32"), 2000)
    assert [*wrong(place, strays, trials["shapes_of_each_kernel"])] == []


@pytest.mark.interpret
@soak("C16", shapes_of_each_kernel=20)
def test_interpreted_kernels_are_as_exact_as_plain_torch(trials: Trials, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "helpers" / "run_random_nodes.py"
    words = (str(tmp_path), str(trials["shapes_of_each_kernel"]), *TRITON)
    run_script(script, *words, folder=tmp_path, interpret=True)
    assert json.loads((tmp_path / "wrong.json").read_text()) == {name: [] for name in TRITON}


def whole(site: Site, m: int, seed: int, device: str) -> list[Tensor]:
    """Inputs of a product: -1, 0 and 1 for its factors, and -4 to 4 for the operands of its epilogue."""
    generator = torch.Generator(device).manual_seed(seed)
    values = []
    for i, type in enumerate(site.inputs):
        most, shape = 1 if i < site.node.op.arity else 4, [m if isinstance(dim, str) else dim for dim in type.shape]
        numbers = torch.randint(-most, most + 1, shape, generator=generator, device=device)
        values.append(numbers.to(DTYPES[type.dtype]))
    return values


def inexact_products(kernel: Kernel, place: Place, shapes: int, deepest: int) -> Iterator[str]:
    """Yields the shapes for which an output is not the exact value, rounded once. `deepest` is the largest K."""
    rng, each = random.Random(11), shapes_of_a_node(kernel)
    done = 0
    while done < shapes:
        n, k = 8 * rng.randint(1, 40), 8 * rng.randint(1, deepest // 8)
        site = make_site(rng.choice(EXACT), n, k, place.target, rng.choice(place.dtypes))
        if kernel.rejects(site) is not None:
            continue
        op = getattr(imported(kernel, site, place.folder / f"whole_{kernel.name}_{done}"), kernel.render(site).function)
        for _ in range(min(each, shapes - done)):
            m = rng.choice((1, 127, 128, 129, rng.randint(1, 999)))
            inputs = whole(site, m, done, place.device)
            for output, exact in zip(many(op(*inputs)), expected(site, inputs), strict=True):
                if not torch.equal(output, exact.to(output.dtype)):
                    yield f"{kernel.name}, {site.key}, {m} rows"
            done += 1


@tiers("C11", shapes_of_the_kernel_of_the_cpu=(10, 200))
def test_products_of_whole_numbers_are_exact_on_the_cpu(trials: Trials, tmp_path: Path) -> None:
    """At most 64 deep: Torch rounds a product in bf16 before its epilogue, and such products are exact in bf16."""
    place = Place(tmp_path, "cpu", dtypes=("bf16", "f32"))
    shapes = trials["shapes_of_the_kernel_of_the_cpu"]
    assert [*inexact_products(KERNELS["torch_epilogue"], place, shapes, 64)] == []


@pytest.mark.gpu
@soak("C11", shapes_of_each_kernel=200)
def test_products_of_whole_numbers_are_exact(trials: Trials, tmp_path: Path) -> None:
    place = Place(tmp_path, gpu_target(), "cuda", ("bf16", "f32"))
    for kernel in KERNELS.values():
        if kernel.computes is Product and kernel.needs and not missing(kernel, TARGETS[place.target]):
            assert [*inexact_products(kernel, place, trials["shapes_of_each_kernel"], 1024)] == []


@pytest.mark.gpu
@soak("C12", inputs_of_each_op=6)
def test_custom_ops_pass_opcheck(trials: Trials, tmp_path: Path) -> None:
    """Their schema, their fakes, and tracing with sizes that vary. Their gradients are ops of their own."""
    target, rng, checked = gpu_target(), random.Random(12), set()
    for kernel in KERNELS.values():
        if missing(kernel, TARGETS[target]) or (kernel.package and not find_spec("flash_attn")):
            continue
        site = random_site(kernel, rng, target, "bf16", "f16", "f32")
        if site is None or not kernel.needs:
            continue
        module = imported(kernel, site, tmp_path / f"opcheck_{kernel.name}")
        registered = getattr(torch.ops, getattr(module, "NAMESPACE", ""), None)
        op = getattr(registered, symbol(site)[1], None)
        if op is None:  # a library's function without an op of its own
            continue
        for seed in range(trials["inputs_of_each_op"]):
            inputs = tuple(inputs_of(site, random_sizes(site, rng, 300), "cuda", seed))
            tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
            slack = None if kernel.deterministic else 1e-2  # sums whose order varies differ between two calls
            torch.library.opcheck(op.default, inputs, test_utils=tests, atol=slack, rtol=slack)
        checked.add(kernel.name)
    assert len(checked) > 5
