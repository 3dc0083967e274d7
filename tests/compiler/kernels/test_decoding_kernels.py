"""Kernels of decoding steps: linear layers of few rows, and rotation with the write to a cache, against float64."""

import ast
import builtins
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_of_time import gpu_of, launch_site, problems
from decoding_sites import AFFINE, RMS, ROPES, rope_site, row_site
from decoding_sites import ROW_CASES as CASES
from gpus import gpu_target, skip_without_e4m3
from kernel_sites import DTYPES, check_clean, check_outputs, empty, imported, interpret_calls, machine_code, written
from torch import Tensor

from specc.compiler.expr import parse, torch_value
from specc.compiler.kernels.epilogue import RESERVED
from specc.compiler.kernels.gemm.row_parts import OURS, parts_of
from specc.compiler.kernels.gemm.rows import ROW_LINEAR_TRITON, row_tile
from specc.compiler.kernels.gemm.rows_torch import ROW_LINEAR_TORCH
from specc.compiler.kernels.kernel import Site
from specc.compiler.kernels.norm_rope.rope_write import ROPE_WRITE_TORCH, ROPE_WRITE_TRITON
from specc.compiler.ops.caches.key_value_cache import decoded
from specc.compiler.ops.decoding.rope_write import RopeWrite
from specc.runtime.model.cuda_graph import captured

ROWS = (1, 2, 17, 67)
# Constants of a generated file for which programs share each tile of more than 16 rows
SHARED_TILES = {"SLICES": 1, "ROWS_K": 16, "JOIN": -(2**40), "MULTIPROCESSORS": 2000}


def site_of(name: str, target: str = "sm90", dtype: str = "f16", out: str = "") -> Site:
    return row_site(CASES[name], target, dtype, out)


def inputs_of(site: Site, m: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(m)
    values = []
    for i, type in enumerate(site.inputs):
        shape = [dim for dim in type.shape if isinstance(dim, int)]
        shape = shape if type.shape[0] != "B" else [m, *shape]
        value = torch.randn(shape, generator=generator, device=device)
        values.append(
            (value * (shape[-1] ** -0.5 if len(type.shape) == 2 else 1) + 0.1 * (i == 0)).to(DTYPES[type.dtype])
        )
    return values


def expected(site: Site, inputs: list[Tensor]) -> list[Tensor]:
    op, wide = site.node.op, [value.double() for value in inputs]
    products = op.reference(*wide[: op.arity])
    accumulators = products if isinstance(products, tuple) else (products,)
    if site.epilogue is None:
        return list(accumulators)
    values: dict[str, Any] = dict(zip(site.epilogue.variables, (*accumulators, *wide[op.arity :]), strict=True))
    return [torch_value(parse(text), values) for text in site.epilogue.outputs]


def test_interpreted_products_are_the_reference(tmp_path: Path) -> None:
    calls, wanted = [], []
    for i, name in enumerate(CASES):
        site = site_of(name, out="f32" if i % 2 else "")
        module = imported(ROW_LINEAR_TRITON, site, tmp_path / f"rows_{i}").__name__
        many_pieces, slices = (1, {"ROW": (4, 16, 1)}), (5, {"SLICES": 4, "ROWS_K": 32})
        # Programs that share a tile, each with a part of the features
        parts = [(m, SHARED_TILES) for m in (20, 33, 50)]
        for m, tile in (*((m, {}) for m in ROWS), many_pieces, slices, *parts):
            inputs = inputs_of(site, m)
            outputs = [torch.full((m + 1, int(t.width)), torch.nan, dtype=DTYPES[t.dtype]) for t in site.node.types]
            calls.append((str(tmp_path), module, {"PDL": False, **tile}, "launch", [*inputs, *outputs]))
            wanted.append((name, m, inputs, expected(site, inputs)))
    for arguments, (name, m, inputs, values) in zip(interpret_calls(tmp_path, calls), wanted, strict=True):
        assert all(map(torch.equal, arguments, inputs)), f"{name}: an input was written"
        for got, value in zip(arguments[len(inputs) :], values, strict=True):
            assert got[m:].isnan().all() and not got[:m].isnan().any(), (name, m)
            torch.testing.assert_close(got[:m].double(), value, rtol=2e-3, atol=2e-3)
    check_clean(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_is_the_reference(name: str, tmp_path: Path) -> None:
    site = site_of(name, "cpu", "f32")
    module = imported(ROW_LINEAR_TORCH, site, tmp_path / f"torch_{name.replace(' ', '_')}")
    inputs = inputs_of(site, 5)
    got = vars(module)[ROW_LINEAR_TORCH.render(site).function](*inputs)
    for value, wanted in zip(got if isinstance(got, tuple) else (got,), expected(site, inputs), strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-5)
    check_clean(tmp_path)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_one_row_loads_whole_vectors_and_several_use_tensor_cores(target: str, tmp_path: Path) -> None:
    site = row_site(((768, 768, 768), 768, RMS, None), target, "bf16")
    module = imported(ROW_LINEAR_TRITON, site, tmp_path / f"compiled_{target}")
    for m in (1, 2, 32, 64):
        height, n, k, slices, _, stages = module.rows_tile(m) if m > 1 else (1, *module.ROW[:2], 1, 1, 1)
        sizes = {"BLOCK_M": height, "BLOCK_N": n, "BLOCK_K": k, "SLICES": slices, "STAGES": stages, "M": 1}
        sizes["WARPS"] = module.ROW[2] if m == 1 else module.ROWS_WARPS
        assert slices == (4 if m == 2 else 1)

        def type_of(name: str, height: int = height) -> str:
            number = name == "M" and height > 1  # Triton compiles a number that is 1 as a constant
            return "*bf16" if name.endswith("_ptr") else "i32" if number else "constexpr"

        code = machine_code(module, site, type_of, sizes)
        ptx = code.asm["ptx"]
        assert code.metadata.shared <= site.target.shared_memory and ".local" not in ptx
        if height == 1:
            assert "ld.global.v4.b32" in ptx and "mma" not in ptx
        else:
            assert "mma" in ptx and "cp.async" in ptx
            assert ("warpsPerCTA = [4, 1, 1]" in code.asm["ttgir"]) == (slices == 4)  # a slice for each warp
        assert ptx.count("griddepcontrol.wait") == (3 if target == "sm90" else 0)  # one for each of q, k and v


@pytest.mark.parametrize("widths", [(768, 768, 768), (3072,), (50257,)])
def test_no_product_reads_x_while_the_next_piece_is_loaded(widths: tuple[int, ...], tmp_path: Path) -> None:
    """A norm reads x beside the product. Triton then has one buffer less of x than of the weights."""
    site = row_site((widths, 768, RMS, None), "sm90", "bf16")
    module = imported(ROW_LINEAR_TRITON, site, tmp_path / f"waits_{widths[0]}")
    function = getattr(module, ROW_LINEAR_TRITON.render(site).function)
    with gpu_of(site.target) as launches:
        launch_site(site, function, {"B": 64, "T": 1})
    (launch,) = launches
    assert problems(launches, tmp_path) == []
    loop = launch.code.asm["ttgir"].split("warp_group_dot ")[1:]
    assert len(loop) == len(widths)
    for each in loop:
        copied = each.partition("async_copy_global_to_local")[0]
        assert "warp_group_dot_wait" in copied and "pendings = 0" in copied


def test_tiles_of_one_row_fill_a_gpu_and_divide_the_features() -> None:
    for widths, k, tile in (((768,), 768, (4, 256)), ((768,), 3072, (4, 1024)), ((50257,), 768, (16, 256))):
        parts = parts_of(row_site((widths, k, None, None)))
        assert (row_tile(parts).n, row_tile(parts).k) == tile


@pytest.mark.parametrize("target", ["sm80", "sm86", "sm90"])
def test_tiles_of_several_rows_load_little_and_keep_memory_busy(target: str, tmp_path: Path) -> None:
    wanted = {  # of 2, 32 and 64 rows: those of x and of the weights of a program, and the parts of the features
        ((768, 768, 768), 768): ((16, 32, 1), (32, 32, 1), (64, 32, 1)),
        ((3072,), 768): ((16, 32, 1), (32, 32, 1), (64, 32, 1)),
        ((768,), 768): ((16, 16, 1), (16, 16, 1), (32, 16, 1)),
        ((768,), 3072): ((16, 16, 1), (16, 16, 1), (64, 32, 4)),  # up to 16 rows have slices, and no parts
        ((50257,), 768): ((16, 64, 1), (32, 64, 1), (64, 64, 1)),
    }
    for i, ((widths, k), tiles) in enumerate(wanted.items()):
        site = row_site((widths, k, None, None), target, "bf16")
        module = imported(ROW_LINEAR_TRITON, site, tmp_path / f"tiles_{target}_{i}")
        for m, tile in zip((2, 32, 64), tiles, strict=True):
            height, n, step, slices, parts, stages = module.rows_tile(m)
            piece = 2 * (height + n) * step
            assert (height, n, parts) == tile and stages * piece <= site.target.shared_memory
            assert (stages - 1) * piece >= 65_536 or stages in (-(-k // (parts * step)) + 1, 8) or target != "sm90"
            # the head has several programs on each multiprocessor, which hide the sums of each other
            assert slices == (4 if m <= 16 and widths != (50257,) else 1) if m != 32 else slices in (1, 4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3] is not None])
def test_no_operand_has_the_name_of_a_variable_of_the_code(name: str, packed: bool, tmp_path: Path) -> None:
    site = row_site(CASES[name], packed=packed)
    operands = {value.name for value in parts_of(site).operands}
    functions = 0
    for path in written(ROW_LINEAR_TRITON, site, tmp_path):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            if not operands & {argument.arg.removesuffix("_ptr") for argument in function.args.args}:
                continue
            functions += 1
            names = [node for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)]
            used = {node.id for node in names if isinstance(node.ctx, ast.Store) or hasattr(builtins, node.id)}
            assert used - operands <= OURS | RESERVED | {"ValueError", "_"}, function.name
    assert functions >= 3 or not operands  # the kernel, its launch and the function that the model calls


@pytest.mark.parametrize(("name", "most"), [("plain", 3), ("residual", 8), ("two outputs", 2), ("gated", 1)])
def test_programs_share_a_tile_if_each_sums_one_product(name: str, most: int, tmp_path: Path) -> None:
    module = imported(ROW_LINEAR_TRITON, site_of(name), tmp_path / f"shared_{name.replace(' ', '_')}")
    vars(module).update(SHARED_TILES)
    k, parts = module.rows_tile(33)[2], module.rows_tile(33)[4]
    assert 1 < parts <= most or parts == most == 1
    each = -(-module.K // (parts * k))
    assert (parts - 1) * each * k < module.K <= parts * each * k  # no part is empty


def test_nodes_that_no_kernel_computes_say_why() -> None:
    assert "computes bf16, f16, f32" in str(ROW_LINEAR_TRITON.rejects(site_of("plain", dtype="f64")))
    assert "separate kernels" in str(ROW_LINEAR_TORCH.rejects(site_of("plain")))
    assert "a dozen kernels" in str(ROPE_WRITE_TORCH.rejects(rope_site()))
    assert "one dtype" in str(ROPE_WRITE_TRITON.rejects(rope_site(cached="f32")))
    assert "up to 1024 channels" in str(ROPE_WRITE_TRITON.rejects(rope_site(c=2048)))
    assert "not f32 on sm90" in str(ROPE_WRITE_TRITON.rejects(rope_site(coded=True, dtype="f32")))
    for site in (rope_site(c=2048), rope_site(coded=True, dtype="f32"), rope_site(coded=True, target="sm86")):
        assert ROPE_WRITE_TORCH.rejects(site) is None  # a step has a kernel for every node that the pass joins


def rope_inputs(site: Site, texts: int, tokens: int, seed: int = 0) -> list[Tensor]:
    """Random inputs. Texts have `tokens` new tokens; with pages, texts have different lengths, and the last has no text
    and writes to a page of its own. Rows of a cache hold other numbers."""
    generator, op = torch.Generator().manual_seed(seed), site.node.op
    assert isinstance(op, RopeWrite)
    page = int(site.inputs[5].shape[1]) if op.paged else 0
    packed = (1, texts * tokens) if page else (texts, tokens)
    sizes = {"B": packed[0], "T": packed[1], "S": 9, "R": texts, "N": 3, "P": 3 * texts + 1}
    given = {}
    for name, type in zip(op.names, site.inputs, strict=True):
        if type.dtype == "u8":
            given[name] = torch.randint(256, type.extents(sizes), generator=generator, dtype=torch.uint8)
        elif type.dtype != "i64":
            value = torch.randn(type.extents(sizes), generator=generator)
            value[value > 2] *= 1000  # outliers share a row with small numbers
            given[name] = value.to(DTYPES[type.dtype])
    angles = torch.randn(given["cos"].shape, generator=generator)
    given["cos"], given["sin"] = angles.cos(), angles.sin()
    given["k"][..., -1, :], given["v"][..., -1, :] = 0, 0  # a row of zeros
    if page:
        table = torch.randperm(3 * texts, generator=generator).view(texts, 3)
        begin = torch.randint(3 * page - tokens + 1, (texts,), generator=generator)
        table[-1], begin[-1] = 3 * texts, 0
        given["positions"], given["table"] = (begin[:, None] + torch.arange(tokens)).flatten(), table
    else:
        begin = 3 if op.ring is None else int(torch.randint(30, (), generator=generator))
        given["positions"] = torch.arange(begin, begin + tokens)
        for name in op.stored:  # the texts of a cache are apart, as those of a part of its positions
            given[name] = torch.cat((given[name], given[name]), 1)[:, : given[name].shape[1]]
    return [given[name] for name in op.names]


def check_rope(site: Site, inputs: list[Tensor], results: list[Tensor], name: str, tolerance: float) -> None:
    """Compares results, of any dtype, with float64. Codes are compared by their values."""
    op = site.node.op
    assert isinstance(op, RopeWrite)
    wanted = op.reference(*(value.double() if value.dtype in DTYPES.values() else value for value in inputs))
    values: list[dict[str, Tensor]] = [dict(zip(op.output_labels, each, strict=True)) for each in (results, wanted)]
    for label, value in values[1].items():
        got = values[0][label]
        if value.dtype == torch.uint8:
            scales = [each[f"{label}_scale"].double() for each in values]
            got, value = (decoded(each[label], scale) for each, scale in zip(values, scales, strict=True))
            # A code may be the next one, because rows are rounded to 16 bits before.
            close = (got - value).abs() <= value.abs() / 8 + 2.0**-8 * scales[1].abs()
            assert bool((close | (got.isnan() & value.isnan())).all()), (name, label)
            continue
        error = (got.double() - value.double()).abs()
        assert bool((error <= tolerance * (1 + value.double().abs())).all()), (name, label, float(error.max()))


def rope_calls(site: Site) -> list[tuple[int, int]]:
    """Numbers of texts and of their new tokens. A ring takes one token per text."""
    ring = isinstance(site.node.op, RopeWrite) and site.node.op.ring is not None
    return [(1, 1), (3, 1), (5, 1)] if ring else [(1, 1), (3, 1), (2, 4)]


def test_interpreted_rotations_and_writes_are_those_of_torch_and_the_reference(tmp_path: Path) -> None:
    calls, cases = [], []
    for i, (name, settings) in enumerate(ROPES.items()):
        site = rope_site(**settings)
        op = site.node.op
        assert isinstance(op, RopeWrite)
        module = imported(ROPE_WRITE_TRITON, site, tmp_path / f"rope_{i}").__name__
        # Torch in the dtype of the kernel, and with several texts per call
        plain = imported(ROPE_WRITE_TORCH, rope_site(**settings, target="cpu"), tmp_path / f"rope_plain_{i}")
        for seed, (texts, tokens) in enumerate(rope_calls(site)):
            inputs = rope_inputs(site, texts, tokens, seed)
            given = [value.clone() for value in inputs]
            wanted = vars(plain)[ROPE_WRITE_TORCH.render(site).function](*given)
            outputs = [torch.full_like(each, 7) for each in (wanted[0], *wanted[1 + len(op.stored) :])]
            calls.append((str(tmp_path), module, {"PDL": False}, "launch", [*inputs, *outputs]))
            cases.append((site, op, [value.clone() for value in inputs], wanted, name))
    for arguments, (site, op, inputs, wanted, name) in zip(interpret_calls(tmp_path, calls), cases, strict=True):
        cache = slice(5, 5 + len(op.stored))
        got = [arguments[len(inputs)], *arguments[cache], *arguments[len(inputs) + 1 :]]
        for label, value, exact in zip(op.output_labels, got, wanted, strict=True):
            same = torch.equal(value, exact)
            if op.paged and label in op.stored:  # the page of rows without a text holds one of their tokens
                same = torch.equal(value[:-1], exact[:-1])
            assert same, (name, label)
        unread = [i for i in range(len(inputs)) if not cache.start <= i < cache.stop]
        assert all(torch.equal(arguments[i], inputs[i]) for i in unread), f"{name}: an input was written"
        check_rope(site, inputs, list(wanted), name, 4e-3)
    check_clean(tmp_path, 120)  # of functions that models have


@pytest.mark.parametrize("name", ROPES)
def test_rotations_and_writes_of_plain_torch_are_the_reference(name: str, tmp_path: Path) -> None:
    site = rope_site(**ROPES[name], target="cpu", dtype="f32")
    module = imported(ROPE_WRITE_TORCH, site, tmp_path / f"rope_torch_{re.sub(r'[ ,]+', '_', name)}")
    function = vars(module)[ROPE_WRITE_TORCH.render(site).function]
    for seed, (texts, tokens) in enumerate(rope_calls(site)):
        inputs = rope_inputs(site, texts, tokens, seed)
        check_rope(site, [value.clone() for value in inputs], list(function(*inputs)), name, 1e-6)
    check_clean(tmp_path, 120)  # of functions that models have


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_products_on_a_gpu_are_the_reference(name: str, dtype: str, folder: Path) -> None:
    site = site_of(name, gpu_target(), dtype)
    module = imported(ROW_LINEAR_TRITON, site, folder / f"gpu_{name.replace(' ', '_')}_{dtype}")
    function = vars(module)[ROW_LINEAR_TRITON.render(site).function]
    for m in (*ROWS, 4, 64, 130):
        inputs = inputs_of(site, m, "cuda")
        got = function(*inputs)
        for value, wanted in zip(got if isinstance(got, tuple) else (got,), expected(site, inputs), strict=True):
            rounding = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-22}[dtype]
            error = (value.double() - wanted).abs() / (1 + wanted.abs())
            # Rounded once, after sums in f32; a weight of the norm rounds the input a second time.
            assert float(error.max()) < (3 if site.node.op.norm == AFFINE else 1.1) * rounding + 1e-5, (name, m)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_programs_that_share_a_tile_give_the_same_bits_in_each_replay(dtype: str, folder: Path) -> None:
    site = row_site(((768,), 3072, None, CASES["residual"][3]), gpu_target(), dtype)
    module = imported(ROW_LINEAR_TRITON, site, folder / f"gpu_shared_{dtype}")
    function = vars(module)[ROW_LINEAR_TRITON.render(site).function]
    for m in (33, 50, 64):
        assert dtype == "f32" or module.rows_tile(m)[4] > 1
        inputs = inputs_of(site, m, "cuda")
        graph, y = captured(lambda inputs=inputs: function(*inputs))
        (wanted,) = expected(site, inputs)
        first = None
        for _ in range(200):
            y.zero_()
            graph.replay()
            first = y.clone() if first is None else first
            assert torch.equal(y, first)
        error = (y.double() - wanted).abs() / (1 + wanted.abs())
        assert float(error.max()) < 1.1 * {"bf16": 2.0**-8, "f32": 2.0**-22}[dtype] + 1e-5
        assert not module.counts(inputs[0]).any()


@pytest.mark.parametrize("name", ROPES)
def test_rotations_and_writes_state_their_types_without_a_gpu(name: str, tmp_path: Path) -> None:
    site = rope_site(**ROPES[name], dtype="bf16")
    module = imported(ROPE_WRITE_TRITON, site, tmp_path / f"rope_fake_{re.sub(r'[ ,]+', '_', name)}")
    function = vars(module)[ROPE_WRITE_TRITON.render(site).function]
    op = site.node.op
    assert isinstance(op, RopeWrite) and op.infer(site.inputs) == site.node.types
    pages = {"B": 1, "T": 6, "R": 3, "N": 4, "P": 12}
    sizes = pages if op.paged else {"B": 3, "T": 2 if op.ring is None else 1, "S": 9}
    check_outputs(function(*(empty(type, **sizes) for type in site.inputs)), site, **sizes)
    with pytest.raises(ValueError, match=r"q is torch.bfloat16 .* on cpu; expected torch.bfloat16 .* on one GPU"):
        function(*(empty(type, "cpu", **sizes) for type in site.inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", ROPES)
def test_rotations_and_writes_on_a_gpu_are_the_bits_of_torch(name: str, dtype: str, folder: Path) -> None:
    words = f"{re.sub(r'[ ,]+', '_', name)}_{dtype}"
    site = rope_site(**ROPES[name], target=gpu_target(), dtype=dtype)
    op = site.node.op
    assert isinstance(op, RopeWrite)
    if op.coded:
        skip_without_e4m3(site.target.name)
    module = imported(ROPE_WRITE_TRITON, site, folder / f"rope_gpu_{words}")
    plain = imported(ROPE_WRITE_TORCH, rope_site(**ROPES[name], target="cpu", dtype=dtype), folder / f"rope_by_{words}")
    function, by_torch = (vars(each)[ROPE_WRITE_TORCH.render(site).function] for each in (module, plain))
    for seed, (texts, tokens) in enumerate([*rope_calls(site), (64, 1)]):
        inputs = [value.cuda() for value in rope_inputs(site, texts, tokens, seed)]
        wanted = by_torch(*(value.clone() for value in inputs))
        for label, got, value in zip(op.output_labels, function(*inputs), wanted, strict=True):
            parts = slice(None, -1 if op.paged and label in op.stored else None)  # without the page of no text
            assert torch.equal(got[parts], value[parts]), (name, label)
    positions = op.names.index("positions")
    with pytest.raises(ValueError, match=r"positions is torch.int32"):
        function(*inputs[:positions], inputs[positions].int(), *inputs[positions + 1 :])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pages", "pages, latent codes", "ring, codes", "codes"])
def test_captured_writes_follow_positions_and_tables(name: str, folder: Path) -> None:
    site = rope_site(**ROPES[name], target=gpu_target(), dtype="bf16")
    op = site.node.op
    assert isinstance(op, RopeWrite)
    if op.coded:
        skip_without_e4m3(site.target.name)
    module = imported(ROPE_WRITE_TRITON, site, folder / f"rope_captured_{re.sub(r'[ ,]+', '_', name)}")
    function = vars(module)[ROPE_WRITE_TRITON.render(site).function]
    fixed = [value.cuda() for value in rope_inputs(site, 3, 1)]
    graph, results = captured(lambda: function(*fixed))
    for seed in range(1, 5):
        given = [value.cuda() for value in rope_inputs(site, 3, 1, seed)]
        for target, value in zip(fixed, given, strict=True):
            target.copy_(value)
        graph.replay()
        for label, got, value in zip(op.output_labels, results, function(*given), strict=True):
            parts = slice(None, -1 if op.paged and label in op.stored else None)
            assert torch.equal(got[parts], value[parts]), (label, seed)


@pytest.mark.parametrize("name", ROPES)
def test_rotations_and_writes_compile(name: str, tmp_path: Path) -> None:
    site = rope_site(**ROPES[name], dtype="bf16")
    op = site.node.op
    assert isinstance(op, RopeWrite)
    module = imported(ROPE_WRITE_TRITON, site, tmp_path / f"rope_compiled_{re.sub(r'[ ,]+', '_', name)}")
    types = dict(zip(op.names, site.inputs, strict=True))
    types |= {f"new_{label}": types[label] for label in op.new}
    words = {"f32": "*fp32", "i64": "*i64", "u8": "*u8", "bf16": "*bf16"}

    def type_of(parameter: str) -> str:
        if parameter.endswith("_ptr"):
            label = parameter.removesuffix("_ptr")
            return words[types[label].dtype] if label in types else "*bf16"
        return "i32" if parameter.endswith("_STRIDE") or parameter == "N" else "constexpr"

    sizes = {"T": 1, "EACH": 1, "BLOCK_R": 8, "BLOCK_C": 8, "BLOCK_V": 32, "WARPS": 1}
    code = machine_code(module, site, type_of, sizes, kernel=module.rope_write_kernel, fused=False)
    ptx = code.asm["ptx"]
    assert ".local" not in ptx and "fma.rn.f32" not in ptx
    assert ("e4m3x2" in ptx) == op.coded
