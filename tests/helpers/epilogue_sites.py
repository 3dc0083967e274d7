"""Products whose epilogues write 8-bit codes or draw masks of dropout."""

from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Site
from specc.compiler.ops.dropout import DRAW
from specc.compiler.ops.fp8 import STORAGE
from specc.compiler.ops.fp8_codes import CodesLinear
from specc.compiler.ops.linear import Dgrad, Linear, Product
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.targets import TARGETS

STATE = TensorType((5, 3), "f32", STORAGE)
# op, dtypes of the factors, format of the codes, column of the scale
FORMS: dict[str, tuple[Product, tuple[str, str], str, int]] = {
    "forward": (Linear(), ("", ""), "e4m3", 0),
    "backward": (Dgrad(), ("", ""), "e5m2", 2),
    "codes": (CodesLinear(), ("e4m3", "e4m3"), "e4m3", 0),
    "gradients": (CodesLinear(), ("e5m2", "e4m3"), "e5m2", 2),
}
P, Q = 0.3, 0.125
ADDED = Pointwise(
    ("x_ + residual * dropped", "x * keep / 0.7"), ("x", "keep", "x_", "residual"), ("y", "dropped"),
    title="dropout_0p3_add_mul", draws=(("keep", P),),
)  # fmt: skip
TWICE = Pointwise(
    ("gelu(d * keep / 0.7) * other / 0.875", "keep - other"), ("d", "keep", "other"), ("dx", "difference"),
    title="two_masks", draws=(("keep", P), ("other", Q)),
)  # fmt: skip


def codes_site(form: str, both: bool, target: str, n: int, k: int, dtype: str = "f16") -> Site:
    """A product whose epilogue writes codes, and with `both` also the value that they round."""
    op, factors, format, factor = FORMS[form]
    acc, variables, more, scales = "p", ("p", "c"), (), ()
    if isinstance(op, CodesLinear):
        acc, variables, more, scales = "(p * scale)", ("p", "c", "scale"), (STATE,), (("scale", 2, 1),)
    value = f"relu({acc}) ** 2 + cos(c * {acc})"  # not 0 beyond the last row
    outputs = (value, f"sin({acc})", *([value] if both else []))
    labels = ("y", "saved", *(["y_codes"] if both else []))
    title = f"act_{format}" + "_both" * both
    epilogue = Pointwise(
        outputs, (*variables, "state"), labels, title=title, scales=scales,
        codes=((2 if both else 0, "state", factor, dtype),),
    )  # fmt: skip
    x, w = (TensorType(shape, name or dtype) for shape, name in zip(
        (("T", k), (n, k) if op.layout == "nk" else (k, n)), factors, strict=True))  # fmt: skip
    inputs = (x, w, TensorType((n,), "f32"), *more, STATE)
    whole, coded = TensorType(("T", n), dtype), TensorType(("T", n), format)
    types = (whole, whole, coded) if both else (coded, whole)
    node = Node("mlp.up", op, tuple(f"v{i}" for i in range(len(inputs))), types, epilogue, ("mlp.up", "mlp.act"))
    return Site(node, inputs, TARGETS[target], "blocks.*.mlp.up + act + down.x_codes", "sample")


def dropout_site(form: str, target: str, n: int, k: int, dtype: str = "f16") -> Site:
    """A product whose epilogue drops its result (`added`), or a gradient with two masks (`twice`)."""
    op: Product = Linear() if form == "added" else Dgrad()
    epilogue = ADDED if form == "added" else TWICE
    whole = TensorType(("T", n), dtype)
    operands = [DRAW, whole, TensorType((n,), "f32")] if form == "added" else [DRAW, DRAW]
    types = (TensorType(("T", k), dtype), TensorType((n, k) if form == "added" else (k, n), dtype), *operands)
    node = Node("mlp.down", op, tuple(f"v{i}" for i in range(len(types))), (whole, whole), epilogue, ("mlp.down",))
    return Site(node, types, TARGETS[target], "blocks.*.mlp.down + dropped", "sample")
