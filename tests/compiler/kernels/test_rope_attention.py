"""Attention of one new token per text that rotates it and writes it to the cache: against the two ops that it joins."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_of_time import gpu_of, launch_site, problems, resources
from cached_sites import CONTEXT, DOCUMENTS, WINDOW, Cached
from gpus import gpu_target, skip_without_e4m3
from kernel_sites import check_clean, check_outputs, empty, imported, interpret_calls
from rope_attention_sites import STEPS, rope_attention_inputs, rope_attention_site
from scored_sites import wide_of
from tiny_models import MLP, tiny
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.ir.graph import Graph
from specc.compiler.ir.text import parse
from specc.compiler.kernels.attention.cached import CACHED_ATTENTION
from specc.compiler.kernels.attention.cached_context import CachedTile
from specc.compiler.kernels.attention.cached_torch import CACHED_TORCH
from specc.compiler.kernels.kernel import Site, symbol
from specc.compiler.kernels.norm_rope.rope_write import ROPE_WRITE_TORCH, ROPE_WRITE_TRITON
from specc.compiler.ops.decoding.rope_attention import RopeAttention
from specc.compiler.targets import TARGETS
from specc.runtime.model.cuda_graph import captured

REAL: dict[str, tuple[Cached, int, bool]] = {
    "gpt2": (Cached(shape=(12, 12, 64)), 32, False),
    "pages": (Cached(shape=(32, 8, 64), page=64), 32, False),
    "partial, neighbors": (Cached(shape=(8, 8, 80)), 10, True),
    "codes": (Cached(shape=(12, 12, 64), coded=True), 32, False),
    "codes in pages": (Cached(shape=(16, 8, 128), coded=True, page=64), 64, False),
    "ring": (Cached(WINDOW, shape=(4, 1, 256), ring=(0, 20)), 128, False),
    "documents": (Cached(DOCUMENTS, shape=(8, 4, 128)), 64, False),
    "many heads of one key": (Cached(shape=(80, 1, 64)), 32, False),
}
ALL = {**STEPS, **REAL}
SPLIT = CachedTile(16, 4, 2, 9)  # with two multiprocessors, up to 18 ranges of keys


def op_of(site: Site) -> RopeAttention:
    assert isinstance(site.node.op, RopeAttention)
    return site.node.op


def module_of(site: Site, folder: Path, name: str, tile: CachedTile | None = None) -> Any:
    return imported(replace(CACHED_ATTENTION, tile=tile), site, folder / f"tested_{re.sub(r'[ ,]+', '_', name)}")


def lengths_of(case: Cached) -> list[tuple[int, ...]]:
    """Tokens of texts, with the new one. Without pages, all texts have one length."""
    if case.page:
        return [(61,), (130, 3, 70), (1, 17, 200, 9), (33,) * 9]
    return [(61,), (1,), (130, 130, 130), (17,) * 9]


def write_site(site: Site, target: str) -> Site:
    """The site of the first of the two ops that `site` joins."""
    op, inputs = op_of(site).write, site.inputs[: op_of(site).write.arity]
    return replace(site, node=replace(site.node, op=op, types=op.infer(inputs)), inputs=inputs, target=TARGETS[target])


def torch_write(site: Site, folder: Path, name: str) -> Any:
    """The function that rotates and writes in plain Torch."""
    module = imported(ROPE_WRITE_TORCH, write_site(site, "cpu"), folder / re.sub(r"[ ,]+", "_", f"torch_{name}"))
    return vars(module)[ROPE_WRITE_TORCH.render(write_site(site, "cpu")).function]


def wanted_of(site: Site, inputs: list[Tensor], write: Any) -> tuple[Tensor, list[Tensor]]:
    """y in float64, over the rows that `write` rounds, and the tensors of the cache after it."""
    op = op_of(site)
    written = write(*(value.clone() for value in inputs[: op.write.arity]))
    y = op.attend.reference(*map(wide_of, op.attended(inputs, written)))
    assert isinstance(y, Tensor)
    return y, list(written[1 : 1 + len(op.write.stored)])


@pytest.mark.interpret
def test_interpreted_kernels_attend_rotate_and_write_as_the_reference(tmp_path: Path) -> None:
    calls, cases = [], []
    for place, (name, (case, pairs, neighbors)) in enumerate(STEPS.items()):
        site = rope_attention_site(case, pairs, neighbors, "f16")  # the interpreter's dot is wrong in bf16
        for tile in (None, SPLIT):
            module = module_of(site, tmp_path, f"step_{place}_{tile is None}", tile).__name__
            write = torch_write(site, tmp_path, f"write_{place}_{tile is None}")
            for seed, lengths in enumerate(lengths_of(case)):
                inputs = rope_attention_inputs(case, site, lengths, 10 * place + seed, apart=5)
                want, cache = wanted_of(site, inputs, write)
                y = torch.full(want.shape, torch.nan, dtype=torch.float16)
                calls.append((str(tmp_path), module, {"PDL": False}, "launch", [*inputs, y]))
                cases.append((f"{name} {lengths}", op_of(site), [x.clone() for x in inputs], want, cache))
    for arguments, (name, op, inputs, want, cache) in zip(interpret_calls(tmp_path, calls), cases, strict=True):
        got = arguments[-1].double()
        tolerance = 2.0**-12 * (want.abs() + 4 * want.abs().max()) + 2.0**-11
        assert bool(((got - want).abs() <= tolerance).all()), name
        written = slice(5, 5 + len(cache))
        for label, value, exact in zip(op.write.stored, arguments[written], cache, strict=True):
            assert torch.equal(value, exact), (name, label)
        unread = [i for i in range(len(inputs)) if not written.start <= i < written.stop]
        assert all(torch.equal(arguments[i], inputs[i]) for i in unread), f"{name}: an input was written"
    check_clean(tmp_path, 120)


@pytest.mark.parametrize("name", REAL)
def test_ops_state_their_types_without_a_gpu(name: str, tmp_path: Path) -> None:
    case, pairs, neighbors = REAL[name]
    site = rope_attention_site(case, pairs, neighbors)
    op = op_of(site)
    assert op.infer(site.inputs) == site.node.types and len(op.output_labels) == len(site.node.types)
    function = getattr(module_of(site, tmp_path, f"fake_{name}"), symbol(site)[0])
    sizes = {"B": 1, "T": 3, "R": 3, "N": 4, "P": 12} if case.page else {"B": 3, "T": 1, "S": 9}
    check_outputs(function(*(empty(type, **sizes) for type in site.inputs)), site, **sizes)
    with pytest.raises(ValueError, match=r"q is torch.bfloat16 .* on cpu; expected torch.bfloat16 .* on one GPU"):
        function(*(empty(type, "cpu", **sizes) for type in site.inputs))
    assert CACHED_ATTENTION.rejects(site) is None and CACHED_TORCH.rejects(site) == "does not write to a cache"
    graph = Graph("g", tuple(zip(site.node.inputs, site.inputs, strict=True)), (), (site.node,), ())
    assert parse(str(graph), {op.name: RopeAttention}) == graph


# --- the pass ---

ATTENTION = {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 16, "rope": {}}
LATENT = {"kind": "latent", "heads": 4, "kv_rank": 32, "rope_dim": 16, "head_dim": 16}


def ops_of(layer: dict[str, Any], target: str = "sm90", cache: dict[str, Any] | None = None, **words: Any) -> Any:
    """The names of the ops of a decoding step, and what the pass states."""
    settings = {"context": 256, "fuse": (), "targets": (target,), **({"cache": cache} if cache else {}), **words}
    programs = pipeline.run(tiny(layers=(layer, MLP), **settings), target, form="decoding")
    names = [node.op.name for graph in programs.graphs for node in graph.nodes]
    return names, [each for each in programs.rewritings if each.step == "rope_attentions"]


@pytest.mark.parametrize(
    ("layer", "cache"),
    [
        (ATTENTION, None),
        (ATTENTION, {"page": 16}),
        (ATTENTION, {"page": None, "dtype": "e4m3"}),
        ({**ATTENTION, "mask": "j <= i and i - j < 40"}, None),
        (ATTENTION, {"page": 64, "dtype": "e4m3"}),
    ],
)
def test_one_node_rotates_writes_and_attends(layer: dict[str, Any], cache: dict[str, Any] | None) -> None:
    names, (stated,) = ops_of(layer, cache=cache)
    assert names.count("rope_attention") == 1
    assert not {"rope", "rope_write", "sdpa_cached", "sdpa_paged", "to_codes"} & {*names}
    assert stated.text == "attention rotates and writes the new token" and not stated.refusal


@pytest.mark.parametrize(
    ("layer", "words", "reason"),
    [
        (LATENT, {}, "another node reads the rotated queries before attention"),
        (ATTENTION, {"context": 128}, "reads caches of more than 128 positions; this one has at most 128"),
        (ATTENTION, {"target": "cpu"}, "cpu has no triton"),
        ({**ATTENTION, "head_dim": 520}, {}, "takes heads of at most 512 channels; these have 520 for keys and 520"),
        (ATTENTION, {"target": "sm86", "cache": {"page": None, "dtype": "e4m3"}}, "needs a GPU that converts e4m3"),
    ],
)
def test_other_nodes_stay_apart_with_a_reason(layer: dict[str, Any], words: dict[str, Any], reason: str) -> None:
    names, (stated,) = ops_of(layer, **words)
    assert "rope_write" in names and "rope_attention" not in names
    assert stated.refusal.startswith(reason) and not stated.text


# --- machine code ---


@pytest.mark.parametrize(
    ("name", "target"),  # sm80 does not convert e4m3
    [(name, target) for name in REAL for target in ("sm80", "sm90") if target == "sm90" or not REAL[name][0].coded],
)
def test_kernels_fit_onto_gpus_as_those_of_attention_do(name: str, target: str, tmp_path: Path) -> None:
    """As many programs are resident, and all loads of earlier keys and values are asynchronous."""
    case, pairs, neighbors = REAL[name]
    apart, site = case.site(target=target), rope_attention_site(case, pairs, neighbors, target=target)
    for texts in (1, 8, 64):
        used = []
        for each in (apart, site):
            function = getattr(
                module_of(each, tmp_path, f"code_{name}_{target}_{texts}_{each is site}"), symbol(each)[0]
            )
            with gpu_of(TARGETS[target]) as launches:
                launch_site(each, function, {"B": texts, "T": 1, "S": CONTEXT})
            assert problems(launches, tmp_path) == []
            registers = resources(launches[:1], tmp_path)[0][0]
            threads = 32 * launches[0].code.metadata.num_warps
            used.append(min(4, 65_536 // (threads * registers)))
        assert used[1] >= used[0] or case.shape[0] > 64, f"{texts} texts: {used} programs are resident"
        if name == "gpt2" and target == "sm90":  # 768 programs for 64 texts, which are all resident
            assert threads == (64 if texts == 64 else 128) and threads * registers * (6 if texts == 64 else 4) <= 65_536
        asm = launches[0].code.asm
        assert ("fma.rn.f32" not in asm["ptx"]) and ("griddepcontrol.wait" in asm["ptx"]) == (target == "sm90")
        loop = asm["ttgir"].partition("tt.atomic_rmw")[0].partition("scf.for")[2].splitlines()
        assert any("async_copy_global_to_local" in line for line in loop)
        assert not [line for line in loop if "tt.load" in line and f"x{case.shape[2]}x!tt.ptr<" in line]


# --- a GPU ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for generated packages."""
    return tmp_path_factory.mktemp("gpu_rope_attention")


def site_on_gpu(case: Cached, pairs: int, neighbors: bool) -> Site:
    site = rope_attention_site(case, pairs, neighbors, target=gpu_target())
    if case.coded:
        skip_without_e4m3(site.target.name)
    return site


def near(y: Tensor, want: Tensor) -> None:
    error = (y.double() - want).abs()
    assert bool(y.isfinite().all())
    assert bool((error <= 2.0**-8 * (want.abs() + 2 * want.abs().max())).all()), error.max()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_one_kernel_gives_what_two_give(name: str, folder: Path) -> None:
    """The cache has the same bits, and y is as near to float64. Repeated calls give the same bits."""
    case, pairs, neighbors = ALL[name]
    site = site_on_gpu(case, pairs, neighbors)
    op = op_of(site)
    fused = getattr(module_of(site, folder, name), symbol(site)[0])
    write = write_site(site, site.target.name)
    attend = case.site(target=site.target.name)
    parts = [
        getattr(imported(kernel, each, folder / f"apart_{kernel.name}_{abs(hash(name))}"), symbol(each)[0])
        for kernel, each in ((ROPE_WRITE_TRITON, write), (CACHED_ATTENTION, attend))
    ]
    lengths = [*lengths_of(case), (1900, 5, 64, 1024, 800) if case.page else (1900,) * 5, (700,) * 64]
    for seed, texts in enumerate(lengths):
        inputs = [x.cuda() for x in rope_attention_inputs(case, site, texts, seed)]
        given = [x.clone() for x in inputs]
        written = parts[0](*given[: op.write.arity])
        apart = parts[1](*op.attended(given, written))
        y, *cache = fused(*inputs)
        for label, have, want in zip(op.write.stored, cache, written[1:], strict=False):
            assert torch.equal(have.nan_to_num(7), want.nan_to_num(7)), (label, texts)
        exact = op.attend.reference(*map(wide_of, op.attended(given, written)))
        assert isinstance(exact, Tensor)
        near(y, exact)
        near(apart, exact)
        assert all(torch.equal(fused(*inputs)[0], y) for _ in range(100)), texts


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "pages", "codes", "ring", "documents"])
def test_captured_steps_follow_the_texts(name: str, folder: Path) -> None:
    """One graph appends 200 tokens, as the float64 reference of each step does over the cache of the step before."""
    case, pairs, neighbors = REAL[name]
    site = site_on_gpu(case, pairs, neighbors)
    op = op_of(site)
    fused = getattr(module_of(site, folder, f"captured {name}"), symbol(site)[0])
    write = torch_write(site, folder, f"captured {name}")
    length, steps = 300, 200
    texts = (length + steps, length + 7 + steps, 30 + steps) if case.page else (length + steps,) * 3
    fixed = dict(zip(op.names, (x.cuda() for x in rope_attention_inputs(case, site, texts, 3)), strict=True))
    fixed["positions"] -= steps - 1
    for label in ("k", "v"):
        fixed[label].nan_to_num_(0.5)
    cache = {label: fixed[label].clone() for label in op.names[5 : 5 + len(op.write.stored)]}
    graph, (y, *_) = captured(lambda: fused(*fixed.values()))
    for label, value in cache.items():
        fixed[label].copy_(value)
    for _ in range(steps):
        for label in ("q", "new_k", "new_v"):
            fixed[label].normal_()
        want, stored = wanted_of(site, list(fixed.values()), write)
        graph.replay()
        near(y, want)
        for label, value in zip(cache, stored, strict=True):
            if label in ("k", "v") and not op.coded:
                near(fixed[label], value.double())
            fixed[label].copy_(value)
        fixed["positions"] += 1
        if op.documents:
            fixed["start"].clamp_(max=int(fixed["positions"].min()))
