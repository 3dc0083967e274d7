"""The nodes that the kernel tests run on, and their generated files as importable packages."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from specc.compiler.ir import Dim, Node, TensorType
from specc.compiler.kernels.kernel import Kernel, Site
from specc.compiler.ops.linear import Dgrad, Linear, Product
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.render import plan_key, render
from specc.compiler.targets import TARGETS

# label -> (outputs, variables with the accumulators first, labels, columns among the operands)
Epilogue = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]]
SILU = "sigmoid(gate) * (1 + gate * (1 - sigmoid(gate)))"
GELU = "0.5 * (1 + erf(0.7071067811865476 * a)) + 0.3989422804014327 * a * exp(-0.5 * a ** 2)"

FORWARD: Mapping[str, Epilogue] = {
    "leaky_relu2": (("0.5 * slope * x", "where(x > 0, 2 * x, 0.5 * x)"), ("x",), ("y", "slope"), ()),
    "gelu": (("gelu(x)",), ("x",), (), ()),
    "relu2": (("relu(x) ** 2",), ("x",), (), ()),
    "scaled_residual": (("residual + scale * y",), ("y", "residual", "scale"), (), ("scale",)),
    "silu_gated": (
        ("x * slope_x", "silu(gate)", f"x * ({SILU})"),
        ("x", "gate"),
        ("y", "slope_x", "slope_gate"),
        (),
    ),
}
BACKWARD: Mapping[str, Epilogue] = {
    "mul": (("d * slope",), ("d", "slope"), (), ()),
    "two_muls": (("d * slope_x", "d * slope_gate"), ("d", "slope_x", "slope_gate"), ("x", "gate"), ()),
    "gelu_grad": ((f"d * ({GELU})",), ("d", "a"), (), ()),
}
EPILOGUES = {**FORWARD, **BACKWARD}


def site(
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
    weights = 2 if name == "silu_gated" else 1
    op: Product = Dgrad() if backward else Linear(weights)
    x = TensorType((*rows, k), dtype)
    weight = TensorType((k, n) if backward else (n, k), dtype)
    tiles = {v: TensorType((*rows, n), dtype) for v in variables[weights:]}
    operands = tiles | {v: TensorType((n,), "f32") for v in columns}
    kind = "mlp.down.dgrad" if backward else "mlp.up"
    refs = (kind[0], *(f"w{i}" for i in range(weights)), *operands)
    node = Node(
        kind,
        op,
        refs,
        tuple(TensorType((*rows, n), out or dtype) for _ in outputs),
        Pointwise(outputs, variables, labels, title=name),
        (kind, "mlp.act"),
    )
    types = (x, *[weight] * weights, *operands.values())
    return Site(node, types, TARGETS[target], f"blocks.*.{kind} + act", "sample")


def written(kernel: Kernel, node: Site, folder: Path) -> list[Path]:
    """Renders the files of a kernel into `folder`, which becomes a package."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()
    paths = []
    for name, (template, context) in kernel.render(node).files.items():
        path = folder / name
        path.write_text(render(template, context, "specs/sample.yaml", plan_key(template, context)), encoding="utf-8")
        paths.append(path)
    return paths


def imported(kernel: Kernel, node: Site, folder: Path) -> ModuleType:
    """Renders a kernel and imports its Python file; `folder` needs a name that no other package has."""
    written(kernel, node, folder)
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    importlib.invalidate_caches()
    return importlib.import_module(f"{folder.name}.{kernel.render(node).module}")
