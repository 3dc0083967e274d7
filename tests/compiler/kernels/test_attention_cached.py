"""Attention over a cache: what the kernel takes and writes, in Triton's interpreter, and as machine code."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_sites import CASES, CONTEXT, DOCUMENTS, WINDOW, Cached, cached_inputs, codes_site, exact
from kernel_sites import (
    GUARD,
    check_clean,
    check_guards,
    check_outputs,
    empty,
    imported,
    interpret,
    interpret_calls,
    machine_code,
    written,
)
from scored_sites import Attention

from specc.compiler.kernels.attention.cached import CACHED_ATTENTION, IN_FLIGHT, cached_tile, row_bytes
from specc.compiler.kernels.attention.cached_context import CachedTile
from specc.compiler.kernels.attention.to_codes import CODES_TRITON
from specc.compiler.kernels.kernel import Site, symbol
from specc.compiler.ops.attention import Sdpa
from specc.compiler.ops.caches.cached_attention import SdpaCached
from specc.compiler.ops.caches.key_value_cache import ToCodes
from specc.runtime.verify.judge import Judge, inputs_of, sizes_of

GPT2, LLAMA = Cached(shape=(12, 12, 64)), Cached(shape=(32, 8, 64), page=64)
LATENT = Cached(shape=(12, 1, 576), values=512, shared=True)
REAL = {
    "gpt2": GPT2,
    "pages": LLAMA,
    "codes in pages": replace(LLAMA, shape=(16, 8, 128), coded=True),
    "codes": replace(GPT2, coded=True),
    "latent": LATENT,
    "latent codes": replace(LATENT, coded=True, page=64),
    "ring": Cached(WINDOW, shape=(4, 1, 256), ring=(0, 20)),
    "documents": Cached(DOCUMENTS, shape=(8, 4, 128)),
}


def kernel_of(tile: CachedTile | None = None) -> Any:
    return replace(CACHED_ATTENTION, tile=tile)


# --- what it takes and writes ---


def test_every_kind_renders_as_clean_python(tmp_path: Path) -> None:
    for i, case in enumerate((*CASES.values(), *REAL.values())):
        written(kernel_of(), case.site(), tmp_path / f"site_{i}")
    check_clean(tmp_path, 120)


def test_refusals_say_why_with_numbers() -> None:
    def reason(case: Cached = GPT2, tile: CachedTile | None = None, **words: Any) -> str | None:
        return kernel_of(tile).rejects(case.site(**words))

    assert reason() is None and reason(target="sm80") is None and reason(context=None) is None
    assert reason(dtype="f32") == "computes in bf16 or f16, not in f32"
    assert (
        reason(Cached(shape=(2, 2, 520)))
        == "takes heads of at most 512 channels; these have 520 for keys and 520 for values"
    )
    assert reason(LATENT) is None
    assert reason(context=128) == "reads caches of more than 128 positions; this one has at most 128"
    assert reason(REAL["codes"], target="sm86") == "needs a GPU that converts e4m3, which is sm89 or later, not sm86"
    assert reason(REAL["codes"], target="sm89") is None
    room = "needs 131,072 bytes of shared memory for the loads of 128 keys, 4 warps, 4 stages,"
    assert (
        reason(tile=CachedTile(128, 4, 4, 1), target="sm86") == f"{room} 1 program a multiprocessor; sm86 has 101,376"
    )


@pytest.mark.parametrize("name", REAL)
def test_the_rule_keeps_memory_busy_and_tiles_to_measure_fit(name: str) -> None:
    for target in ("sm90", "sm89"):
        site = REAL[name].site(target=target)
        tile, row = cached_tile(site), row_bytes(site)
        ahead = tile.stages - 1 - bool(REAL[name].page)  # one stage loads the number of the page
        room = site.target.shared_memory
        assert target != "sm90" or ahead * tile.keys * row * tile.programs >= IN_FLIGHT
        assert tile.loaded_bytes(row) <= room
        tiles = [kernel.tile for kernel in kernel_of().variants(site)]
        assert tiles[0] == tile and len(set(tiles)) == len(tiles) > 4
        assert all(kernel.rejects(site) is None for kernel in kernel_of().variants(site))
    assert str(cached_tile(GPT2.site())) == "64 keys, 4 warps, 2 stages, 4 programs a multiprocessor"
    with pytest.raises(ValueError, match="keys is 48, but must be a power of two from 16 to 256"):
        CachedTile(48, 4, 2, 1)


def test_files_are_named_after_score_layout_and_size() -> None:
    names = [symbol(REAL[name].site())[1] for name in ("gpt2", "pages", "latent codes", "ring")]
    assert names == [
        "cached_attention__h12_g12_c64",
        "paged_attention__h32_g8_c64",
        "paged_attention_e4m3__h12_g1_c576_v512",
        "cached_attention_d_lt_20__h4_g1_c256",
    ]


@pytest.mark.parametrize("name", ["plain", "ring, codes", "pages, latent codes", "documents"])
def test_ops_state_their_types_without_a_gpu(name: str, tmp_path: Path) -> None:
    site = CASES[name].site()
    op = getattr(
        imported(kernel_of(), site, tmp_path / f"fake_cached_{name.replace(', ', '_').replace(' ', '_')}"),
        symbol(site)[0],
    )
    pages = {"B": 1, "T": 6, "R": 3, "N": 4, "P": 12}
    sizes = pages if CASES[name].page else {"B": 3, "T": 2, "S": 9}
    check_outputs(op(*(empty(type, **sizes) for type in site.inputs)), site, **sizes)
    with pytest.raises(ValueError, match=r"is torch.bfloat16 .* on cpu; expected torch.bfloat16 .* on one GPU"):
        op(*(empty(type, "cpu", **sizes) for type in site.inputs))


@pytest.mark.parametrize("name", CASES)
def test_random_inputs_are_accepted_by_the_reference(name: str) -> None:
    site = CASES[name].site("bf16")
    for rows in (2, 129):
        judge = Judge.of(site, inputs_of(site, sizes_of(site, rows), "cpu", seed=rows))
        assert bool(judge.exact[0].isfinite().all()) and judge.exact[0].abs().max() > 0


def test_attention_over_a_cache_is_attention_over_the_whole_text() -> None:
    for name in ("plain", "documents", "ring, first keys", "pages, first keys", "alibi, sinks"):
        case = replace(CASES[name], coded=False)
        site = case.site("f32")
        inputs = cached_inputs(case, site, (50,), 50, 1)
        given = dict(zip(site.node.op.names, inputs, strict=True))  # type: ignore[attr-defined]
        if case.page:
            k, v = (given[n][given["table"][0]].flatten(0, 1)[None, :50] for n in "kv")
        else:
            k, v = (given[f"new_{n}" if case.ring else n][:, :50] for n in "kv")
        others = [given[n] for n in ("start", "sinks") if n in site.node.op.names]  # type: ignore[attr-defined]
        op = Sdpa(*site.node.op.of_scores)  # type: ignore[attr-defined]
        wide = [x.double() if x.is_floating_point() else x for x in (given["q"], k, v, *others)]
        torch.testing.assert_close(exact(site, inputs), op.reference(*wide), rtol=1e-10, atol=1e-10)


# --- Triton's interpreter ---

# Lengths of texts, and the queries of each. The prompts of 23 tokens have a partial tile of queries and one of keys,
# and turn a ring of 20 positions.
TEXTS = (((61,), 1), ((130, 3, 70), 2), ((200, 9), 1), ((23, 23), 23))
TILES = (None, CachedTile(16, 4, 2, 9))  # with two multiprocessors, the second splits into up to 18 parts
RUNS = [(name, place, texts) for name in CASES for place in range(len(TILES)) for texts in TEXTS]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """The contents that the interpreter leaves in the buffer of each run, whether the inputs are unchanged, and the
    output in float64."""
    folder = tmp_path_factory.mktemp("interpreted_cached")
    runs, wanted, modules = [], [], dict[tuple[str, int], str]()
    for seed, (name, place, (lengths, each)) in enumerate(RUNS):
        site = CASES[name].site("f16")  # the interpreter's dot is wrong in bf16
        if (name, place) not in modules:
            package = folder / f"interpreted_cached_{len(modules)}"
            modules[name, place] = imported(kernel_of(TILES[place]), site, package).__name__
        given = cached_inputs(CASES[name], site, lengths, each, seed, apart=5)
        want = exact(site, given)
        buffer = torch.full((want.numel() + 2 * GUARD,), torch.nan, dtype=torch.float16)
        runs.append((str(folder), modules[name, place], given, [buffer], [want.shape[-1]]))
        wanted.append(want)
    return {run: (*result, want) for run, result, want in zip(RUNS, interpret(folder, runs), wanted, strict=True)}


@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_give_the_reference(name: str, interpreted: dict[Any, Any]) -> None:
    for run in (run for run in RUNS if run[0] == name):
        (buffer,), unchanged, want = interpreted[run]
        assert unchanged, "an input was written"
        check_guards(buffer, f"y of {run}")
        got = buffer[GUARD : buffer.numel() - GUARD].view(want.shape).double()
        # half a unit of f16 where y is stored, and of each weight before it is multiplied
        tolerance = 2.0**-12 * (want.abs() + 4 * want.abs().max()) + 2.0**-11
        excess = ((got - want).abs() / tolerance).max()
        assert excess <= 1, f"y of {run} is off by {excess:.3g} tolerances"


@pytest.mark.interpret
def test_a_ring_that_holds_the_row_of_the_query_already_gives_the_same_bits(tmp_path: Path) -> None:
    """A decoding step writes a ring before it reads it. The new row replaces a position that the query does not see."""
    runs, cases = [], []
    for name in ("ring", "ring, first keys", "ring, documents", "ring, codes"):
        case, site = CASES[name], CASES[name].site("f16")
        op, ring = site.node.op, case.ring
        assert isinstance(op, SdpaCached) and ring is not None
        module = imported(kernel_of(), site, tmp_path / f"written_{len(cases)}").__name__
        for length in (3, ring[0] + ring[1], 61):
            before = dict(zip(op.names, cached_inputs(case, site, (length, length), 1, length), strict=True))
            position = length - 1
            slot = position if position < ring[0] else ring[0] + (position - ring[0]) % ring[1]
            after = {label: value.clone() for label, value in before.items()}
            for label in (label for label in op.names if f"new_{label}" in before):
                after[label][:, slot] = before[f"new_{label}"][:, 0]
            wanted = [exact(site, list(given.values())) for given in (before, after)]
            assert torch.equal(*wanted), name
            for given in (before, after):
                buffer = torch.full((wanted[0].numel() + 2 * GUARD,), torch.nan, dtype=torch.float16)
                runs.append((str(tmp_path), module, list(given.values()), [buffer], [wanted[0].shape[-1]]))
            cases.append((name, length))
    buffers = [buffer for (buffer,), _ in interpret(tmp_path, runs)]
    for case, first, second in zip(cases, buffers[::2], buffers[1::2], strict=True):
        check_guards(first, "y")
        assert torch.equal(first[GUARD:-GUARD], second[GUARD:-GUARD]), case


@pytest.mark.interpret
def test_pages_and_rows_give_the_same_bits(tmp_path: Path) -> None:
    rows, pages = Cached(shape=(6, 2, 32)), Cached(shape=(6, 2, 32), page=16)
    sites = rows.site("f16"), pages.site("f16")
    q, k, v, positions = cached_inputs(rows, sites[0], (77, 77, 77), 2, 5)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 16)) for x in (k, v))  # 96 positions
    table = torch.randperm(18, generator=torch.Generator().manual_seed(2)).view(3, 6)
    k_pages, v_pages = k.new_zeros(18, 16, 2, 32), v.new_zeros(18, 16, 2, 32)
    for paged, x in ((k_pages, k), (v_pages, v)):
        paged[table.flatten()] = x.reshape(18, 16, 2, 32)
    runs = []
    for i, (site, given) in enumerate(
        zip(
            sites,
            ([q, k, v, positions], [q.reshape(1, 6, 6, 32), k_pages, v_pages, positions.repeat(3), table]),
            strict=True,
        )
    ):
        module = imported(kernel_of(CachedTile(16, 4, 2, 9)), site, tmp_path / f"layouts_{i}").__name__
        buffer = torch.full((q.numel() + 2 * GUARD,), torch.nan, dtype=torch.float16)
        runs.append((str(tmp_path), module, given, [buffer], [32]))
    (((first,), _), ((second,), _)) = interpret(tmp_path, runs)
    check_guards(first, "y")
    assert torch.equal(first[GUARD:-GUARD], second[GUARD:-GUARD])


@pytest.mark.interpret
def test_the_last_program_joins_parts_as_a_second_kernel_does(tmp_path: Path) -> None:
    """In the same order, so that the bits are the same. A second launch writes y only if the counts are 0 again."""
    calls, names = [], ("plain", "other values", "alibi, sinks", "pages, codes, sinks", "latent")
    for place, name in enumerate(names):
        site = CASES[name].site("f16")
        given = cached_inputs(CASES[name], site, (300, 9) if CASES[name].page else (300,) * 2, 1, place)
        module = imported(kernel_of(CachedTile(16, 4, 2, 9)), site, tmp_path / f"joined_{place}").__name__
        for most, launch in ((1 << 20, 0), (1 << 20, 1), (0, 0)):
            y = torch.full((*given[0].shape[:3], int(site.node.type.width)), torch.nan, dtype=torch.float16)
            constants: dict[str, Any] = {"PDL": False, "JOINED_BYTES": most, "JOINED_TILE": 1 << 20}
            constants |= {} if launch else {"COUNTS": {}}
            calls.append((str(tmp_path), module, constants, "launch", [*given, y]))
    ys = [arguments[-1] for arguments in interpret_calls(tmp_path, calls)]
    for place, name in enumerate(names):
        first, again, apart = ys[3 * place : 3 * place + 3]
        assert bool(first.isfinite().all()) and torch.equal(first, again) and torch.equal(first, apart), name


@pytest.mark.interpret
@pytest.mark.parametrize("channels", [64, 24, 576])
def test_rows_are_rounded_to_the_codes_of_the_reference(channels: int, tmp_path: Path) -> None:
    site = codes_site(channels, "f16")
    x = torch.randn(37, channels, generator=torch.Generator().manual_seed(channels)).half()
    x[3], x[4, 1:], x[5] = 0, 0, x[5] * 1e-6
    module = imported(CODES_TRITON, site, tmp_path / f"codes_{channels}").__name__
    codes = torch.full((x.numel() + 2 * GUARD,), 77, dtype=torch.uint8)
    scale = torch.full((len(x) + 2 * GUARD,), torch.nan)
    (((codes, scale), unchanged),) = interpret(tmp_path, [(str(tmp_path), module, [x], [codes, scale], [channels, 1])])
    check_guards(scale, "scale")
    want_codes, want_scale = ToCodes().reference(x)
    assert unchanged and (codes[:GUARD] == 77).all() and (codes[-GUARD:] == 77).all()
    assert torch.equal(scale[GUARD:-GUARD].view(-1, 1), want_scale)
    # The interpreter's conversion drops a carry of the mantissa into the exponent, rounds numbers below 2^-6 down, and
    # ties away from 0. The GPU test compares these codes too.
    have = codes[GUARD:-GUARD].view(-1, channels)
    errors = [(value.view(torch.float8_e4m3fn).float() - x / want_scale).abs() for value in (have, want_codes)]
    assert ((errors[0] <= errors[1]) | (want_codes & 7 == 0) | (want_codes & 0x7F < 8)).all()
    assert (have == want_codes).float().mean() > 0.9


def test_rounding_compiles_and_is_judged_by_codes(tmp_path: Path) -> None:
    for channels, target in ((64, "sm90"), (576, "sm90"), (128, "sm89")):
        site = codes_site(channels, "bf16", target)
        module = imported(CODES_TRITON, site, tmp_path / f"codes_{channels}_{target}")
        kinds = {"x_ptr": "*bf16", "codes_ptr": "*u8", "scale_ptr": "*fp32", "N": "i32"}
        code = machine_code(module, site, lambda name, kinds=kinds: kinds.get(name, "constexpr"))  # type: ignore[misc]
        assert "cvt.rn.satfinite.e4m3x2" in code.asm["ptx"] and ".f64" not in code.asm["ptx"]
    judge = Judge.of(site, inputs_of(site, sizes_of(site, 64), "cpu"))
    assert all(error.ok for error in judge.errors(judge.call(ToCodes().reference)))
    codes, scale = ToCodes().reference(*judge.inputs)
    assert not judge.errors((codes ^ 0x80, scale))[0].ok and not judge.errors((codes, 2 * scale))[1].ok


# --- machine code ---


def compiled(site: Site, folder: Path, rows: int, partial: bool = True) -> Any:
    """The machine code of the kernel of a site for `rows` rows. If it writes parts, it joins them, of one token."""
    module = imported(kernel_of(), site, folder)
    element = {"bf16": "*bf16", "f16": "*fp16"}[site.inputs[0].dtype]
    coded = site.node.op.coded  # type: ignore[attr-defined]

    def type_of(name: str) -> str:
        if not name.endswith("_ptr"):
            return "i32" if name in ("T", "PARTS", "APART", "N") else "constexpr"
        tensor = name.removesuffix("_ptr").removeprefix("new_")
        kinds = {"parts": "*fp32", "sums": "*fp32", "counts": "*i32", "k_scale": "*fp32", "v_scale": "*fp32"}
        kinds |= dict.fromkeys(("positions", "table", "start"), "*i64") | (dict.fromkeys("kv", "*u8") if coded else {})
        return kinds.get(tensor, element)

    joined = 1 << (module.H // module.G - 1).bit_length()
    block = max(1, module.JOINED_TILE // (joined * module.VALUES))
    sizes = {"ROWS": rows, "PARTIAL": partial, "JOINED": joined if partial else 0, "BLOCK_P": min(block, 16)}
    return machine_code(module, site, type_of, sizes)


@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "sm90") for name in REAL), ("gpt2", "sm80"), ("latent", "sm80"), ("codes in pages", "sm120")],
)
def test_keys_are_prefetched_and_multiplied_on_tensor_cores(name: str, target: str, tmp_path: Path) -> None:
    site = REAL[name].site(target=target)
    code = compiled(site, tmp_path / f"cached_{target}_{name.replace(' ', '_')}", 16)
    ptx = code.asm["ptx"]
    assert "mma.sync" in ptx and "cp.async.cg.shared.global" in ptx
    assert ".f64" not in ptx and ".local" not in ptx
    # a program is counted after its threads have stored, and reads the parts of others from the L2 cache
    assert ptx.count("atom.global.gpu.acq_rel.add.u32") == 1 and "bar.sync" in ptx.partition("atom.")[0][-3000:]
    assert "ld.global.cg" in ptx.partition("atom.")[2] and "ld.global.cg" not in ptx.partition("atom.")[0]
    assert ("griddepcontrol.wait" in ptx) == (site.target.arch >= 90)
    assert code.metadata.shared <= site.target.shared_memory and len(code.asm["cubin"]) > 10_000
    # every load of keys and values inside the loop is asynchronous: before it, the kernel reads q and positions
    loop = code.asm["ttgir"].partition("tt.atomic_rmw")[0].partition("scf.for")[2]
    assert not [line for line in loop.splitlines() if "tt.load" in line and "!tt.ptr<" in line and "x64x" in line]


def test_prompts_and_kernels_that_add_parts_compile(tmp_path: Path) -> None:
    for name in ("gpt2", "latent", "ring"):
        site = REAL[name].site()
        code = compiled(site, tmp_path / f"cached_prompt_{name}", 32 if name == "latent" else 64, partial=False)
        assert code.metadata.shared <= site.target.shared_memory
    site = replace(REAL["documents"]).site()
    module = imported(kernel_of(), site, tmp_path / "cached_join")

    def type_of(name: str) -> str:
        kinds = {"parts_ptr": "*fp32", "sums_ptr": "*fp32", "PARTS": "i32"}
        return kinds.get(name, "*bf16" if name.endswith("_ptr") else "constexpr")

    constants = {"BLOCK_P": 128, "CHANNELS": 64}
    code = machine_code(module, site, type_of, constants, module.join_kernel)
    assert ".f64" not in code.asm["ptx"] and ".local" not in code.asm["ptx"]


def test_scores_that_the_expressions_state_compile(tmp_path: Path) -> None:
    attention = Attention("20 * tanh(s / 20) + bias[h, bucket(i - j, 32, 128)]", tables={"bias": (8, 32)}, sinks=True)
    site = Cached(attention, shape=(8, 2, 64), page=64).site(context=CONTEXT)
    code = compiled(site, tmp_path / "cached_softcap", 16)
    assert "tanh.approx.f32" in code.asm["ptx"]
