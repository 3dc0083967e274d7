"""Matrix products in Torch. Without an epilogue, the product is a library call on any target. With an epilogue, the
product is plain Torch code on the CPU."""

from typing import ClassVar, NamedTuple

from specc.compiler.expr import reread, torch_text
from specc.compiler.ir.types import DTYPES
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, symbol, unless_cpu
from specc.compiler.kernels.lines import HEADER, flowed, listed, nested, returned, unbroken
from specc.compiler.ops.linear import Product


class LibraryProduct(Kernel):
    """A matrix product without an epilogue, as one Torch call."""

    def rejects(self, site: Site) -> str | None:
        if site.epilogue is not None:
            return f"has an epilogue, {symbol(site)[0]}; the library's product has none"
        return None

    def render(self, site: Site) -> Rendered:
        return Rendered("", "", {}, "")


class EpilogueContext(NamedTuple):
    """The context of templates/torch/product.py.jinja."""

    header: str
    signature: str
    lines: tuple[str, ...]
    returns: str
    uses_torch: bool
    uses_functional: bool
    draws: bool
    rounds: bool


class EpilogueProduct(Kernel):
    """A matrix product and its epilogue as a plain Torch function: a readable reference, and the kernel of the CPU."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        unfused = unless_cpu(site, "would run the epilogue as separate kernels, not fused")
        return unfused or ("has no epilogue" if site.epilogue is None else None)

    def render(self, site: Site) -> Rendered:
        op, epilogue = site.node.op, site.epilogue
        assert epilogue is not None and isinstance(op, Product)
        rows = "x" if "x" not in epilogue.variables else "rows"
        weights = tuple(f"w_{v}" if op.arity > 2 else "w" for v in epilogue.variables[: op.arity - 1])
        products = zip(epilogue.variables, weights, strict=False)
        labels = epilogue.output_labels or ("y",)
        texts = [torch_text(reread(text)) for text in epilogue.outputs]
        lines = [f"{v} = {op.product_text(rows, w)}" for v, w in products]
        masked = epilogue.variables[0]
        lines += [nested(name, f"kept({masked}, {name}, {p!r}).to({masked}.dtype)") for name, p in epilogue.draws]
        lines += [f"{name} = {name}[0, {i}] * {name}[0, {j}]" for name, i, j in epilogue.scales]
        roundings = {i: (state, factor) for i, state, factor, _ in epilogue.codes}
        for i in (*range(1, len(texts)), *([0] if 0 in roundings else [])):
            lines.append(nested(labels[i], texts[i]))
            if i in roundings:
                state, factor = roundings[i]
                lines.append(f"largest_of({state}, {factor}, {labels[i]})")
                dtype = DTYPES[site.node.types[i].dtype]
                lines.append(nested(labels[i], f"rounded({labels[i]}, {state}[0, {factor}], {dtype})"))
        returns = ", ".join((labels[0] if 0 in roundings else texts[0], *labels[1:]))
        names = (rows, *weights, *(v for v, _ in site.operands))
        annotation = "Tensor" if len(texts) == 1 else f"tuple[{', '.join('Tensor' for _ in texts)}]"
        types = f"{' x '.join(map(str, site.inputs))} -> {', '.join(map(str, site.node.types))}"
        function, module = symbol(site)
        code = "\n".join((*lines, returns))
        context = EpilogueContext(
            flowed(f"{unbroken(site.label)}    {types}", "# ", "    ", HEADER),
            listed(f"def {function}(", [f"{name}: Tensor" for name in names], f") -> {annotation}:"),
            tuple(lines),
            returned(returns),
            "torch." in code or bool(epilogue.draws),
            "F." in code,
            bool(epilogue.draws),
            bool(roundings),
        )
        return Rendered(function, module, {f"{module}.py": ("torch/product.py.jinja", context)}, "")


LIBRARY_PRODUCT = LibraryProduct("torch", "torch")
EPILOGUE_PRODUCT = EpilogueProduct("torch_epilogue", "torch")
