"""The nodes that kernels take, the reasons for refusals, the rule for tiles, and the form of generated files."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from epilogue_sites import codes_site
from kernel_sites import EPILOGUES, FORWARD, check_clean, make_site, written

import specc.compiler.kernels
import specc.templates
from specc.compiler.catalog import catalog
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import BYTES, TensorType
from specc.compiler.kernels.epilogue import epilogue_of
from specc.compiler.kernels.gemm.evt import COOPERATIVE, GEMM_EVT, PINGPONG
from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.kernel import Kernel, Site, missing
from specc.compiler.kernels.tile import ROWS, Tile, tile_of
from specc.compiler.ops.linear import Linear, Wgrad
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.targets import TARGETS

KERNELS = {"triton": LINEAR_TRITON, "cutlass": GEMM_EVT}
TEMPLATES = sorted(Path(specc.templates.__path__[0]).rglob("*.jinja"))


def with_epilogue(site: Site, *outputs: str, variables: tuple[str, ...] = (), labels: tuple[str, ...] = ()) -> Site:
    """The site with another epilogue; its outputs have the type of the first."""
    assert site.epilogue is not None
    epilogue = replace(site.epilogue, outputs=outputs, variables=variables or site.epilogue.variables, labels=labels)
    return replace(site, node=replace(site.node, epilogue=epilogue, types=(site.node.type,) * len(outputs)))


def with_inputs(site: Site, **types: TensorType) -> Site:
    """The site with some inputs of other types; `v2` is the third."""
    return replace(site, inputs=tuple(types.get(f"v{i}", type) for i, type in enumerate(site.inputs)))


def typed(site: Site, dtype: str) -> Site:
    return replace(site, node=replace(site.node, types=(replace(site.node.type, dtype=dtype),)))


def wgrad_site() -> Site:
    types = (TensorType(("T", 512), "bf16"), TensorType(("T", 256), "bf16"))
    epilogue = Pointwise(("2 * d",), ("d",))
    node = Node("mlp.up.wgrad", Wgrad(), ("a", "b"), (TensorType((512, 256), "bf16"),), epilogue)
    return Site(node, types, TARGETS["sm90"], "mlp.up.wgrad", "sample")


def three_weights() -> Site:
    site = make_site("silu_gated")
    epilogue = Pointwise(("a * b * c",), ("a", "b", "c"), title="three")
    node = replace(site.node, op=Linear(3), epilogue=epilogue, types=site.node.types[:1])
    return replace(site, node=node, inputs=(*site.inputs, site.inputs[1]))


BF16, F32 = "bf16", "f32"
PLAIN = make_site("gelu")
MUL = make_site("mul")
BOTH_REFUSE = {
    "no product": (wgrad_site(), "computes products of rows and weights; wgrad is not such a product"),
    "no epilogue": (
        replace(PLAIN, node=replace(PLAIN.node, epilogue=None)),
        "computes products with an epilogue; for a plain product, cuBLAS is faster",
    ),
    "dtype": (make_site("gelu", dtype=F32), "multiplies bf16 or f16; the input is f32"),
    "two dtypes": (
        with_inputs(PLAIN, v1=TensorType((1792, 512), "f16")),
        "multiplies two operands of the same dtype; the input is bf16 and the weight f16",
    ),
    "k": (
        make_site("gelu", 1792, 500),
        "needs rows of a multiple of 16 bytes; K = 500 bf16 is 1000 bytes, 496 or 504 would do",
    ),
    "n": (
        make_site("mul", 1001, 512),
        "needs rows of a multiple of 16 bytes; N = 1001 bf16 is 2002 bytes, 1000 or 1008 would do",
    ),
    "operand shape": (
        with_inputs(MUL, v2=TensorType(("T", 1), BF16)),
        "reads operands of [T,1792] or [1792]; slope is bf16[T,1]",
    ),
    "scalar": (with_inputs(MUL, v2=TensorType((), F32)), "reads operands of [T,1792] or [1792]; slope is f32[]"),
    "operand dtype": (
        with_inputs(MUL, v2=TensorType(("T", 1792), "i8")),
        "reads operands in bf16, f16, f32; slope is i8",
    ),
    "output dtype": (typed(PLAIN, "i8"), "writes bf16, f16, f32; output 0 is i8"),
    "idle operand": (with_epilogue(MUL, "2 * d"), "reads only operands that its outputs need; no output reads slope"),
    "constant output": (with_epilogue(PLAIN, "0.5"), "writes tiles of [rows, 1792]; y is the same in every row"),
    "column output": (
        with_epilogue(make_site("scaled_residual"), "residual + scale * y", "scale ** 2", labels=("", "square")),
        "writes tiles of [rows, 1792]; square is the same in every row",
    ),
    "huge constant": (with_epilogue(PLAIN, "1e39 * x"), "cannot print y: the constant 1e+39 does not fit a float"),
}
REFUSALS = [(name, site, words, kernel) for name, (site, words) in BOTH_REFUSE.items() for kernel in KERNELS] + [
    ("accumulators", three_weights(), "keeps at most 2 accumulators in registers; this node has 3", "triton"),
    (
        "output dtype",
        make_site("gelu", out=F32),
        "writes the dtype that it multiplies, bf16; an output is f32",
        "cutlass",
    ),
    (
        "tile dtype",
        with_inputs(MUL, v2=TensorType(("T", 1792), F32)),
        "reads tiles of the dtype that it multiplies, bf16; it is given slope f32[T,1792]",
        "cutlass",
    ),
    (
        "huge weight",
        make_site("gelu", 65536, 32768),
        "addresses weights with 32-bit offsets; 65536 x 32768 elements need more",
        "triton",
    ),
]


@pytest.mark.parametrize(("name", "site", "words", "kernel"), REFUSALS, ids=[f"{r[0]}-{r[3]}" for r in REFUSALS])
def test_refusals_say_why_with_numbers(name: str, site: Site, words: str, kernel: str) -> None:
    assert KERNELS[kernel].rejects(site) == words


@pytest.mark.parametrize("name", EPILOGUES)
def test_every_target_has_a_kernel_for_every_epilogue(name: str) -> None:
    for target in ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120"):
        site = make_site(name, target=target)
        assert missing(LINEAR_TRITON, site.target) is None and LINEAR_TRITON.rejects(site) is None
        assert (missing(GEMM_EVT, site.target) is None) == (target == "sm90")


def test_the_catalogue_finds_the_kernels_and_ranks_them() -> None:
    result = catalog(specc.compiler.kernels, Kernel)
    assert result["linear_triton"] is LINEAR_TRITON and result["gemm_evt"] is GEMM_EVT
    for name in ("gelu", "mul", "silu_gated"):
        assert GEMM_EVT.rank(make_site(name)) < LINEAR_TRITON.rank(make_site(name))


@pytest.mark.parametrize(
    ("name", "target", "n", "k", "tile"),
    [
        ("leaky_relu2", "sm90", 1792, 512, Tile(128, 256, 64, 8, 4)),
        ("mul", "sm90", 1792, 512, Tile(128, 256, 64, 8, 3)),  # the tile it reads takes the room of a stage
        ("silu_gated", "sm90", 1792, 512, Tile(128, 128, 64, 8, 4)),
        ("gelu", "sm90", 640, 512, Tile(128, 128, 64, 8, 4)),  # 256 would pad 640 to 768
        ("gelu", "sm90", 8, 16, Tile(128, 32, 16, 4, 4)),
        ("gelu", "sm80", 1792, 512, Tile(128, 128, 64, 8, 4)),
        ("gelu", "sm86", 1792, 512, Tile(128, 128, 64, 8, 3)),
        ("mul", "sm120", 1792, 512, Tile(128, 128, 32, 8, 4)),
    ],
)
def test_tiles_follow_shape_and_target(name: str, target: str, n: int, k: int, tile: Tile) -> None:
    assert tile_of(TARGETS[target], epilogue_of(make_site(name, n, k, target))) == tile


def test_wide_tiles_of_8_bit_operands_are_twice_as_tall_and_deep() -> None:
    sites = (codes_site("codes", False, "sm90", n, k) for n, k in ((3072, 768), (3072, 64), (3072, 192), (64, 768)))
    tiles = [tile_of(site.target, epilogue_of(site)) for site in sites]
    assert [(tile.m, tile.k) for tile in tiles] == [(256, 128), (128, 64), (128, 64), (128, 128)]


def random_site(generator: random.Random) -> Site:
    name = generator.choice(list(EPILOGUES))
    n, k = (8 * generator.randrange(1, generator.choice((8, 600))) for _ in range(2))
    target = generator.choice((*["sm90"] * 5, "sm80", "sm86", "sm89", "sm100", "sm120"))
    rows = generator.choice((("T",), ("B", "T"), (4, "T", 3)))
    label = ".".join(generator.choice(("blocks", "*", "encoder_of_things", "mlp", "up")) for _ in range(6))
    site = make_site(name, n, k, target, generator.choice(("bf16", "f16")), rows, generator.choice(("", "", "f32")))
    return replace(site, label=label)


def random_sites(count: int) -> list[Site]:
    generator = random.Random(20)
    return [random_site(generator) for _ in range(count)]


def test_tiles_fit_the_shared_memory_of_their_target() -> None:
    for site in random_sites(500):
        epilogue = epilogue_of(site)
        tile = tile_of(site.target, epilogue)
        stage = (tile.m + tile.n * len(epilogue.accumulators)) * tile.k * BYTES[epilogue.x.type.dtype]
        half = tile.m * tile.n // 2 * max(BYTES[value.type.dtype] for value in epilogue.outputs)
        staged = half if "tma" in site.target.features else 0
        assert tile.stages * stage + staged <= site.target.shared_memory
        assert tile.m == ROWS and tile.stages in (2, 3, 4) and tile.n >= 32 and tile.k >= 16
        assert tile.n * len(epilogue.accumulators) <= 256


def test_random_sites_render_as_clean_python_and_cuda(tmp_path: Path) -> None:
    taken = {"py": 0, "cu": 0}
    for i, site in enumerate(random_sites(60)):
        for kernel in (LINEAR_TRITON, GEMM_EVT, replace(GEMM_EVT, tile=COOPERATIVE)):
            if kernel.rejects(site) or missing(kernel, site.target):
                continue
            for path in written(kernel, site, tmp_path / f"site_{i}_{sum(taken.values())}"):
                taken[path.suffix[1:]] += 1
    assert taken["py"] >= 60 and taken["cu"] >= 15
    check_clean(tmp_path)


def test_a_measured_tile_replaces_the_rule(tmp_path: Path) -> None:
    site = make_site("mul")
    tile = Tile(64, 128, 64, 4, 5, 2)
    (path,) = written(replace(LINEAR_TRITON, tile=tile), site, tmp_path / "triton")
    assert "BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64\nWARPS, STAGES, RESIDENT = 4, 5, 2\n" in path.read_text()
    source, _ = written(replace(GEMM_EVT, tile=COOPERATIVE), site, tmp_path / "cutlass")
    text = source.read_text()
    assert "KernelTmaWarpSpecializedCooperative;" in text and "epilogue::TmaWarpSpecializedCooperative;" in text
    assert "cute::Shape<cute::Int<128>, cute::Int<256>, cute::Int<64>>" in text


def test_the_walk_of_a_tile_is_no_reason_to_compile_again(tmp_path: Path) -> None:
    site, tile = make_site("mul"), replace(PINGPONG, part=(64, 64))
    walked = replace(tile, swizzle=2, raster=2)
    module, its_launcher = written(replace(GEMM_EVT, tile=tile), site, tmp_path / "one")
    other, launcher = written(replace(GEMM_EVT, tile=walked), site, tmp_path / "other")
    code, same = (re.sub(r"//.*", "", path.read_text()) for path in (module, other))  # comments compile nothing again
    assert code == same and its_launcher.read_bytes() != launcher.read_bytes()
    assert "SWIZZLE, RASTER = 2, 2" in launcher.read_text()
    assert "using EpilogueTile = cute::Shape<cute::Int<64>, cute::Int<64>>;" in module.read_text()
    words = "128x128x64, pingpong, cluster 2x1x1, epilogue 64x64, swizzle 2, along N"
    assert GEMM_EVT.tile == PINGPONG and str(walked) == words


def test_the_library_computes_all_products_but_the_last(tmp_path: Path) -> None:
    site = make_site("silu_gated")
    source, launcher = (path.read_text() for path in written(GEMM_EVT, site, tmp_path / "gated"))
    assert "    p_x = torch.mm(x.view(m, K), w_x.T)\n" in launcher
    for text in (source, launcher):
        assert "    p_x = x w_x^T, by the library, bf16\n" in text and "    p_gate = x w_gate^T\n" in text
    assert "Fragment const& p_gate, Fragment const& p_x) const {" in source
    assert "static_cast<Element const*>(w_gate), stride_w}" in source and "w_x)" not in source
    assert "        x.data_ptr(), w_gate.data_ptr(), p_x.data_ptr(), y.data_ptr()," in launcher
    assert GEMM_EVT.render(site).tile == f"p_x by the library; {PINGPONG}"
    assert GEMM_EVT.between(site) == (site.node.type,) * 2  # written, and read
    assert GEMM_EVT.between(PLAIN) == () == LINEAR_TRITON.between(site)
    assert GEMM_EVT.padding(site, 128 * 8) == 1 and GEMM_EVT.padding(site, 129) == pytest.approx(1 + 127 / 129 / 2)
    _, three = (path.read_text() for path in written(GEMM_EVT, three_weights(), tmp_path / "three"))
    assert "    p_a = torch.mm(x.view(m, K), w_a.T)\n    p_b = torch.mm(x.view(m, K), w_b.T)\n" in three


def test_a_product_that_is_an_output_is_written_by_the_library(tmp_path: Path) -> None:
    site = make_site("silu_gated_pre")
    source, launcher = (path.read_text() for path in written(GEMM_EVT, site, tmp_path / "kept"))
    assert "    torch.mm(x.view(m, K), w_x.T, out=pre_x.view(m, N))\n" in launcher
    assert "        x.data_ptr(), w_gate.data_ptr(), pre_x.data_ptr(), y.data_ptr(), pre_gate.data_ptr()," in launcher
    assert "void const* pre_x, void* y, void* pre_gate" in " ".join(source.split())
    assert "struct ComputeY" in source and "struct ComputePre" not in source  # the accumulator is stored as it is
    # accumulator, tile, store of the accumulator, value
    assert "using Reads = cute::tuple<cute::seq<>, cute::seq<>, cute::seq<0>, cute::seq<0, 1>>;" in source
    assert "    y = silu(p_gate) * pre_x\n" in source and GEMM_EVT.between(site) == (site.node.type,)


@pytest.mark.parametrize("target", ["sm80", "sm86", "sm90"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_variants_are_distinct_and_fit_their_target(name: str, target: str) -> None:
    site = make_site(name, target=target)
    for kernel in (LINEAR_TRITON, GEMM_EVT):
        if kernel.rejects(site) or missing(kernel, site.target):
            continue
        variants = kernel.variants(site)
        assert len(variants) >= 3 and len(set(map(str, (v.render(site).tile for v in variants)))) == len(variants)
        assert all(variant.padding(site, 1000) >= 1 for variant in variants)
    for variant in LINEAR_TRITON.variants(site):
        tile = variant.tile  # type: ignore[attr-defined]
        stage = (tile.m + tile.n * (site.node.op.arity - 1)) * tile.k * 2
        assert stage * tile.stages * tile.resident <= site.target.shared_memory


def test_names_in_generated_code_are_all_different() -> None:
    for name in EPILOGUES:
        epilogue = epilogue_of(make_site(name))
        names = [value.name for value in (*epilogue.inputs, *epilogue.outputs)] + list(epilogue.accumulators)
        assert len(set(names)) == len(names)
    epilogue = epilogue_of(make_site("clashes"))
    assert [value.name for value in epilogue.operands] == ["x_", "tl_", "n_", "p_", "float_"]
    assert [str(result.expr) for result in epilogue.results] == ["p + x_ * tl_ * n_ + w_", "p_ - float_"]


@pytest.mark.parametrize("name", FORWARD)
def test_a_kernel_is_one_file_that_depends_on_nothing_else(name: str, tmp_path: Path) -> None:
    site = make_site(name)
    first, second = (written(LINEAR_TRITON, site, tmp_path / folder)[0] for folder in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert first.stem == f"linear_{name}__n1792_k512" == LINEAR_TRITON.render(site).module


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_stay_within_their_budget(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    assert text.count("{% if") + text.count("{%- if") <= 5


def test_there_are_templates() -> None:
    names = {path.name for path in TEMPLATES}
    assert names >= {"linear_tma.py.jinja", "linear_pointer.py.jinja", "gemm_evt.cu.jinja", "gemm_evt.py.jinja"}
