"""Int8 products to render, compile and run: sites, operands, and what they have to give."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from specc.compiler.build import kernel_files
from specc.compiler.expr import reread, torch_value
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Kernel, Site
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import Int8Linear
from specc.compiler.targets import TARGETS
from specc.runtime.model.load import import_file

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i8": torch.int8}


@dataclass(frozen=True)
class Case:
    """An epilogue over the sums `p`: its operands by name (`dtype` of a column, `dtype*` of a tile) and output."""

    text: str
    operands: Mapping[str, str]
    y: str
    title: str


CASES = {
    "plain": Case("p * scale", {"scale": "f32"}, "f32", "f32"),
    "bf16": Case("p * scale", {"scale": "f32"}, "bf16", "bf16"),
    "residual": Case("x_ + gain * (p * scale)", {"scale": "f32", "x_": "bf16*", "gain": "bf16"}, "bf16", "add_bf16"),
    "codes": Case("gelu(p * scale) * inverse", {"scale": "f32", "inverse": "f32"}, "i8", "gelu_i8"),
    "sum": Case("sigmoid(x_ + p * scale)", {"scale": "f32", "x_": "f32*"}, "f32", "add_sigmoid_f32"),
}


def int8_site(name: str, n: int, k: int, target: str = "cpu") -> Site:
    """The site of one of CASES."""
    case = CASES[name]
    rows = ("B", "T")
    types = [
        TensorType((*rows, n) if dtype.endswith("*") else (n,), dtype.rstrip("*")) for dtype in case.operands.values()
    ]
    inputs = (TensorType((*rows, k), "i8"), TensorType((n, k), "i8"), TensorType((n,), "i32"), *types)
    epilogue = Pointwise((case.text,), ("p", *case.operands), title=case.title)
    refs = ("x", "@w", "@b", *case.operands)
    node = Node("part.up", Int8Linear(), refs, (TensorType((*rows, n), case.y),), epilogue, ("part.up", "part.act"))
    return Site(node, inputs, TARGETS[target], "part.up + act", "tiny")


def operands(site: Site, rows: tuple[int, ...], seed: int, device: str = "cpu") -> list[Tensor]:
    """Random codes, offsets and operands, of sizes that leave no sum at zero."""
    generator = torch.Generator().manual_seed(seed)
    n, k = site.node.op.extent(site.inputs[1])  # type: ignore[attr-defined]
    results = [
        torch.randint(-127, 128, (*rows, k), generator=generator, dtype=torch.int8),
        torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8),
        torch.randint(-(2**20), 2**20, (n,), generator=generator, dtype=torch.int32),
    ]
    for name, type in site.operands:
        shape = (n,) if len(type.shape) == 1 else (*rows, n)
        value = torch.randn(shape, generator=generator)
        if name == "scale":
            value = value.abs() * 1e-5 + 1e-6
        elif name == "inverse":
            value = value.abs() * 20 + 1
        results.append(value.to(DTYPES[type.dtype]))
    return [tensor.to(device) for tensor in results]


def exact(site: Site, given: list[Tensor]) -> Tensor:
    """The expected outputs of a site: sums in whole numbers, by numpy; the epilogue in float64, not rounded."""
    x, w, offset, *others = (tensor.cpu() for tensor in given)
    sums = torch.from_numpy(x.long().numpy() @ w.long().numpy().T) + offset.long()
    epilogue = site.epilogue
    assert epilogue is not None
    values = {epilogue.variables[0]: sums.double()}
    values |= {name: other.double() for (name, _), other in zip(site.operands, others, strict=True)}
    return torch_value(reread(epilogue.outputs[0]), values)


def written(kernel: Kernel, site: Site, folder: Path) -> Path:
    """The files of a kernel in `folder`; returns the longest-lived of them, the .cu if there is one."""
    rendered = kernel.render(site)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in kernel_files(rendered, "", "specs/tiny.yaml").items():
        (folder / name).write_text(text)
    return folder / max(rendered.files, key=lambda name: name.endswith(".cu"))


def imported(kernel: Kernel, site: Site, folder: Path) -> ModuleType:
    """The Python module of a kernel."""
    written(kernel, site, folder)
    return import_file(folder, kernel.render(site).module)


def close(result: Tensor, wanted: Tensor) -> None:
    """Codes are the nearest, but where the exact value lies between two; floats as near as their dtype is."""
    result = result.cpu()
    if result.dtype == torch.int8:
        wanted = wanted.clamp(-127, 127)
        assert bool(((result.double() - wanted).abs() <= 0.5 + 1e-3).all())
        return
    loose = {torch.float32: 2e-5, torch.bfloat16: 8e-3}[result.dtype]
    torch.testing.assert_close(result.double(), wanted, rtol=loose, atol=loose)
