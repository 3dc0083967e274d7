"""The nodes that the kernel tests run on: sites, inputs, references, and generated files as packages."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from fork_server import run_script
from torch import Tensor

from specc.compiler.build import kernel_files
from specc.compiler.expr import parse, torch_value
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.kernels.gemm.triton import LINEAR_TRITON
from specc.compiler.kernels.kernel import Kernel, Site, symbol
from specc.compiler.ops.linear import Dgrad, Linear, Product
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.plan.lock import plan_key
from specc.compiler.targets import TARGETS

# outputs; variables, accumulators first; labels; which operands are columns
Epilogue = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
SILU = "sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))"
GELU = "0.5 * (1 + erf(0.7071067811865476 * a)) + 0.3989422804014327 * a * exp(-0.5 * a ** 2)"

FORWARD: Mapping[str, Epilogue] = {
    "leaky_relu2": (("0.5 * slope * x", "where(x > 0, 2 * x, 0.5 * x)"), ("x",), ("y", "slope"), ()),
    "gelu": (("gelu(x)",), ("x",), (), ()),
    "relu2": (("relu(x) ** 2",), ("x",), (), ()),
    "relu6": (("min(max(x, 0), 6)",), ("x",), (), ()),
    "scaled_residual": (("residual + scale * y",), ("y", "residual", "scale"), (), ("scale",)),
    "silu_gated": (("x * slope_x", "silu(gate)", f"x * ({SILU})"), ("x", "gate"), ("y", "slope_x", "slope_gate"), ()),
    "gelu_pre": (("gelu(x)", "x"), ("x",), ("y", "pre_x"), ()),
    "silu_gated_pre": (("silu(gate) * x", "x", "gate"), ("x", "gate"), ("y", "pre_x", "pre_gate"), ()),
    # Words that the generated code uses itself, and labels that are variables too.
    "clashes": (("y + x * tl * n + w", "p - float"), ("y", "x", "tl", "n", "p", "float"), ("p", "w"), ("n",)),
}
BACKWARD: Mapping[str, Epilogue] = {
    "mul": (("d * slope",), ("d", "slope"), (), ()),
    "two_muls": (("d * slope_x", "d * slope_gate"), ("d", "slope_x", "slope_gate"), ("x", "gate"), ()),
    "gelu_grad": ((f"d * ({GELU})",), ("d", "a"), (), ()),
    "silu_gated_grad": (("d * silu(gate)", f"d * pre_x * ({SILU})"), ("d", "pre_x", "gate"), ("x", "dgate"), ()),
}
EPILOGUES = {**FORWARD, **BACKWARD}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
POINTERS = {"bf16": "*bf16", "f16": "*fp16", "f32": "*fp32", "i64": "*i64", "e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
# The blocks of the descriptors that launch() makes: of x, of each weight, and half a tile of anything else.
BLOCKS = {"x": "BLOCK_M, BLOCK_K", "nk": "BLOCK_N, BLOCK_K", "kn": "BLOCK_K, BLOCK_N", "half": "BLOCK_M, HALF_N"}
GUARD = 512  # poisoned elements on either side of an output


def make_site(
    name: str,
    n: int = 1792,
    k: int = 512,
    target: str = "sm90",
    dtype: str = "bf16",
    rows: tuple[Dim, ...] = ("T",),
    out: str = "",
) -> Site:
    """A site of one of EPILOGUES; outputs have dtype `out`, where it is given, and columns are fp32."""
    outputs, variables, labels, columns = EPILOGUES[name]
    backward = name in BACKWARD
    weights = 2 if name in ("silu_gated", "silu_gated_pre") else 1
    op: Product = Dgrad() if backward else Linear(weights)
    weight = TensorType((k, n) if backward else (n, k), dtype)
    shapes: list[tuple[Dim, ...]] = [(n,) if v in columns else (*rows, n) for v in variables[weights:]]
    operands = [TensorType(shape, "f32" if shape == (n,) else dtype) for shape in shapes]
    types = (TensorType((*rows, k), dtype), *[weight] * weights, *operands)
    path = "mlp.down.dgrad" if backward else "mlp.up"
    results = tuple(TensorType((*rows, n), out or dtype) for _ in outputs)
    epilogue = Pointwise(outputs, variables, labels, title=name)
    node = Node(path, op, tuple(f"v{i}" for i in range(len(types))), results, epilogue, (path, "mlp.act"))
    return Site(node, types, TARGETS[target], f"blocks.*.{path} + act", "sample")


def written(kernel: Kernel, site: Site, folder: Path) -> list[Path]:
    """Renders the files of a kernel into `folder`, which becomes a package."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()
    paths = []
    rendered = kernel.render(site)
    for name, text in kernel_files(rendered, plan_key(kernel, site, rendered.tile), "specs/sample.yaml").items():
        (folder / name).write_text(text, encoding="utf-8")
        paths.append(folder / name)
    return paths


def check_clean(folder: Path, width: int = 110) -> None:
    """Asserts that the generated files of `folder` are tidy, have lines of at most `width` columns, and pass Ruff."""
    paths = [path for path in folder.rglob("*") if path.suffix in (".py", ".cu") and path.name != "__init__.py"]
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        wide = [line for line in text.splitlines() if len(line) > width or line != line.rstrip()]
        assert not wide, f"{path.name}: {wide}"
        assert "\n\n\n\n" not in text and text.endswith("\n") and not text.endswith("\n\n")
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    config = Path(__file__).parents[2] / "pyproject.toml"
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(config), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def machine_code(
    module: ModuleType,
    site: Site,
    type_of: Callable[[str], str],
    constants: Mapping[str, int] | None = None,
    kernel: Any = None,
    fused: bool = True,
) -> Any:
    """Compiles a Triton kernel of a generated file for the target of its site, without a GPU.

    Args:
        module: the generated file.
        site: the node.
        type_of: the Triton type of a parameter by name; "constexpr" for a constant.
        constants: the values of constants that are not values of the module, or other values of them.
        kernel: the kernel, if it is not named after the site.
        fused: whether products and sums may be fused.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernel or jitted(module, site)
    types = {name: type_of(name) for name in inspect.signature(kernel.fn).parameters}
    known = {**vars(module), **(constants or {})}
    values = {name: known[name] for name, type in types.items() if type == "constexpr"}
    aligned = (i for i, (name, type) in enumerate(types.items()) if type[0] == "*" or name.endswith("STRIDE"))
    even = {(i,): [["tt.divisibility", 16]] for i in aligned if list(types.values())[i] != "constexpr"}
    options = {"num_warps": known["WARPS"]} | ({"num_stages": known["STAGES"]} if "STAGES" in known else {})
    options |= {} if fused else {"enable_fp_fusion": False}
    source = ASTSource(kernel, types, values, even)
    return triton.compile(source, target=GPUTarget("cuda", site.target.arch, 32), options=options)


def compiled(site: Site, folder: Path) -> Any:
    """Compiles the Triton kernel of a product for the target of its site, without a GPU."""
    module = imported(LINEAR_TRITON, site, folder)
    tensors = dict(zip(parameters(module, site), (*site.inputs, *site.node.types), strict=True))
    first, *weights = list(tensors)[: site.node.op.arity]
    sizes = {**vars(module), "HALF_N": module.BLOCK_N // 2}

    def type_of(name: str) -> str:
        tensor, _, kind = name.rpartition("_")
        if kind == "ptr":
            return POINTERS[tensors[tensor].dtype]
        if kind == "desc":
            role = "x" if tensor == first else site.node.op.layout if tensor in weights else "half"
            block = [sizes[word] for word in BLOCKS[role].split(", ")]
            return f"tensordesc<{POINTERS[tensors[tensor].dtype][1:]}{block}>"
        return "i32" if name == "M" else "constexpr"

    return machine_code(module, site, type_of, {"PROGRAMS": 132})


def empty(type: TensorType, device: str = "meta", **sizes: int) -> Tensor:
    """Returns zeros of a type, whose symbolic dims have `sizes`."""
    dtype = {**DTYPES, "i64": torch.int64, "u8": torch.uint8, "bool": torch.bool}[type.dtype]
    return torch.zeros([dim if isinstance(dim, int) else sizes[dim] for dim in type.shape], dtype=dtype, device=device)


def check_outputs(outputs: Tensor | Sequence[Tensor], site: Site, **sizes: int) -> None:
    """Asserts that outputs are contiguous and have the types of the node, whose symbolic dims have `sizes`."""
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    for output, type in zip(outputs, site.node.types, strict=True):
        want = empty(type, **sizes)
        assert (output.shape, output.dtype, output.is_contiguous()) == (want.shape, want.dtype, True)


def joined(sources: Iterable[Path], folder: Path) -> Path:
    """One .cu file in `folder` of several for one architecture: nvcc takes most of its time over what they include."""
    folder.mkdir(parents=True, exist_ok=True)
    heads: dict[str, None] = {}
    bodies = []
    for i, source in enumerate(sources):
        lines = source.read_text(encoding="utf-8").splitlines()
        heads |= dict.fromkeys(line for line in lines if line.startswith(("#include", "// arch:")))
        bodies += [f"namespace part_{i} {{", *(line for line in lines if line not in heads), "}"]
    assert sum(head.startswith("//") for head in heads) <= 1, "of several architectures"
    path = folder / "joined.cu"
    path.write_text("\n".join((*heads, *bodies, "")), encoding="utf-8")
    return path


def jitted(module: ModuleType, site: Site) -> Any:
    """The Triton kernel of a generated file."""
    return getattr(module, f"{symbol(site)[0]}_kernel")


def imported(kernel: Kernel, site: Site, folder: Path) -> ModuleType:
    """Renders a kernel and imports its Python file; `folder` needs a name that no other package has."""
    written(kernel, site, folder)
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    importlib.invalidate_caches()
    return importlib.import_module(f"{folder.name}.{kernel.render(site).module}")


def parameters(module: ModuleType, site: Site) -> list[str]:
    """The names of the tensors that `launch` takes, which must be as many as the site has."""
    names = list(inspect.signature(module.launch).parameters)
    assert len(names) == len(site.inputs) + len(site.node.types)
    return names


def sample_inputs(site: Site, m: int, seed: int, device: str = "cpu") -> list[Tensor]:
    """Random inputs of a site with m rows. Weights are scaled so that products have unit variance."""
    generator = torch.Generator(device).manual_seed(seed)
    k = site.inputs[0].width
    assert isinstance(k, int)
    tensors = []
    for i, type in enumerate(site.inputs):
        shape = [dim if isinstance(dim, int) else m for dim in type.shape]
        value = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        scale = k**-0.5 if 0 < i < site.node.op.arity else 1.0
        tensors.append((value * scale).to(DTYPES[type.dtype]))
    return tensors


def expected(site: Site, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs in float64, of the inputs as they are."""
    return _computed(site, [value.double() for value in inputs])


def eager(site: Site, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs as plain Torch computes them, rounding after every operation."""
    return _computed(site, [value.to(inputs[0].dtype) for value in inputs])


def _computed(site: Site, inputs: Sequence[Tensor]) -> list[Tensor]:
    op, epilogue = site.node.op, site.epilogue
    assert epilogue is not None
    products = op.reference(*inputs[: op.arity])
    accumulators = products if isinstance(products, tuple) else (products,)
    values: dict[str, Tensor | float] = dict(zip(epilogue.variables, (*accumulators, *inputs[op.arity :]), strict=True))
    further = [torch_value(parse(text), values) for text in epilogue.outputs[1:]]
    saved = zip(epilogue.labels[1:], further, strict=True) if epilogue.labels else ()
    values = {**dict(saved), **values}
    return [torch_value(parse(epilogue.outputs[0]), values), *further]


def poisoned(site: Site, m: int, device: str = "cpu") -> list[Tensor]:
    """Buffers full of NaN that hold an output of m rows and a guard on either side."""
    n = site.node.type.width
    assert isinstance(n, int)
    return [
        torch.full((m * n + 2 * GUARD,), torch.nan, dtype=DTYPES[type.dtype], device=device) for type in site.node.types
    ]


def inner(buffer: Tensor, site: Site) -> Tensor:
    """The output inside its guards, [rows, N]."""
    n = site.node.type.width
    assert isinstance(n, int)
    return inside(buffer, n)


def inside(buffer: Tensor, width: int) -> Tensor:
    """The values between the guards, [rows, width]."""
    return buffer[GUARD : buffer.numel() - GUARD].view(-1, width)


def rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()


def check_guards(buffer: Tensor, name: str) -> None:
    """Every element of the output is written and none beside it."""
    guards = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
    assert guards.isnan().all(), f"{name} is written beside its end"
    unwritten = int(buffer[GUARD : buffer.numel() - GUARD].isnan().sum())
    assert unwritten == 0, f"{unwritten} elements of {name} are not written"


def interpret(folder: Path, runs: list[Any]) -> list[Any]:
    """Runs Triton's interpreter in a separate process. Returns the results of run_interpreted.py for each run."""
    torch.save(runs, folder / "cases.pt")
    words = (str(folder / "cases.pt"), str(folder / "out.pt"))
    run_script(Path(__file__).with_name("run_interpreted.py"), *words, folder=folder, interpret=True)
    results: list[Any] = torch.load(folder / "out.pt")
    return results


def interpret_calls(folder: Path, calls: list[Any]) -> list[Any]:
    """Runs Triton's interpreter in a separate process. Returns the arguments after each call of
    run_interpreted_calls.py."""
    torch.save(calls, folder / "calls.pt")
    words = (str(folder / "calls.pt"), str(folder / "after.pt"))
    run_script(Path(__file__).with_name("run_interpreted_calls.py"), *words, folder=folder, interpret=True)
    results: list[Any] = torch.load(folder / "after.pt")
    return results


def library_outputs(folder: Path, runs: list[Any]) -> list[list[Tensor]]:
    """Runs generated files that call a library's attention, in a separate process. Returns the outputs of each run."""
    torch.save(runs, folder / "runs.pt")
    words = (str(folder), str(folder / "runs.pt"), str(folder / "results.pt"))
    run_script(Path(__file__).with_name("run_flash.py"), *words, folder=folder, interpret=True)
    results: list[list[Tensor]] = torch.load(folder / "results.pt")
    return results
