"""Softmax cross-entropy of logits, with its gradient if the loss is trained on: a Triton kernel, and plain Torch for
the CPU."""

from dataclasses import dataclass, replace
from typing import ClassVar

from specc.compiler.expr import ExprError, derive, number, reread, torch_text, triton_text, variables
from specc.compiler.ir.graph import Op
from specc.compiler.kernels.custom_op import DTYPES
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, symbol
from specc.compiler.kernels.lines import assigned, flowed, listed, unbroken
from specc.compiler.kernels.tile import MOST_WARPS, between, counted, power
from specc.compiler.ops.loss import SoftmaxLoss

ELEMENTS = {"bf16": "tl.bfloat16", "f32": "tl.float32"}
WHOLE = 8192  # columns; longer rows do not fit in registers
LARGEST = 1 << 17  # elements of a tile
TILE = 4096  # elements that a program holds: 32 per thread, each with two to four floats


@dataclass(frozen=True, slots=True)
class RowTile:
    """The work of one program: `rows` rows, `columns` columns at a time, with `warps` warps.

    If `columns` covers whole rows, they stay in registers. Raises ValueError if a field is out of its bounds.
    """

    rows: int
    columns: int
    warps: int

    def __post_init__(self) -> None:
        power("rows", self.rows, 1, LARGEST)
        power("columns", self.columns, 1, LARGEST)
        power("warps", self.warps, 1, MOST_WARPS)
        between("rows x columns", self.rows * self.columns, 1, LARGEST)

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}, {counted(self.warps, 'warp')}"


def row_tile(width: int) -> RowTile:
    """Returns the tile, by rule, for rows of `width` columns.

    A row that fits in registers is read once, and a program has several short rows. Of a longer row, each thread loads
    16 bytes of bf16 at a time. Such a row is read twice. The number of rows in flight must be small enough that L2
    still holds them for the second read: with 16 warps per program, at most four programs share a multiprocessor.
    """
    columns = 1 << (width - 1).bit_length()
    if columns > WHOLE:
        return RowTile(1, TILE, 16)
    return RowTile(max(1, TILE // columns), columns, 8 if columns > TILE else 4)


# Tiles worth measuring: columns and warps for long rows, elements and warps for rows in registers.
LONG = ((4096, 16), (8192, 16), (4096, 8), (8192, 8), (8192, 32), (16384, 16), (16384, 32), (2048, 8))
SHORT = ((4096, 4), (4096, 8), (2048, 4), (8192, 8), (2048, 2), (1024, 4), (1024, 1), (8192, 16))


@dataclass(frozen=True, slots=True)
class LossContext:
    """The context of templates/triton/softmax_loss.py.jinja.

    Attributes:
        how: A description of the kernel's algorithm.
        functions: Name, docstring and return statement of each function of a logit.
        body: The template of the kernel.
        learns: Whether the kernel also computes the gradient.
        wanted: The expression of the target's logit after `bound`.
        read: The name of a loaded logit.
        bound: The line that computes `f` from a loaded logit, if they differ.
        partial: Whether some tile has columns that are not logits.
        padded: Whether rows have padding after the logits.
        inside: The mask of the elements of a tile that are inside the tensor of logits.
        slope: The factor by the function's derivative, or "".
    """

    TEMPLATE: ClassVar[str] = "triton/softmax_loss.py.jinja"
    header: str
    summary: str
    formulas: tuple[str, ...]
    how: str
    namespace: str
    node: str
    function: str
    symbol: str
    vocab: int
    width: int
    dtype: str
    element: str
    settings: str
    functions: tuple[tuple[str, str, str], ...]
    kernel: str
    body: str
    learns: bool
    wanted: str
    read: str
    bound: tuple[str, ...]
    partial: bool
    padded: bool
    inside: str
    slope: str
    launch_signature: str
    grid: str
    arguments: str
    annotation: str
    promise: str
    allocated: tuple[str, ...]
    tensors: str
    returns: str
    fake: str


@dataclass(frozen=True, slots=True)
class SoftmaxLossTriton(Kernel):
    """Accepts any vocabulary size and any function of the logits. `tile` is a measured tile; if it is None, the rule of
    `row_tile` applies."""

    computes: ClassVar[type[Op]] = SoftmaxLoss
    TILE: ClassVar[type | None] = RowTile
    tile: RowTile | None = None

    def rejects(self, site: Site) -> str | None:
        dtype = site.inputs[0].dtype
        if dtype not in ELEMENTS:
            return f"reads logits in bf16 or f32; in {dtype} the gradient of a mean is too small a number"
        try:
            triton_text(reread(loss_of(site).f)), triton_text(derive(reread(loss_of(site).f), "z"))
        except ExprError as error:
            return f"cannot print {loss_of(site).f}: {error.message}"
        if self.tile is not None and self.tile.rows > 1 and self.tile.columns < width_of(site):
            return f"takes several rows at a time only whole; of {width_of(site)} columns {self.tile} does not hold all"
        return None

    def rank(self, site: Site) -> int:
        return 0

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        columns = 1 << (width_of(site) - 1).bit_length()
        tiles = [RowTile(1, *tile) for tile in LONG]
        if columns <= WHOLE:
            tiles = [RowTile(max(1, size // columns), columns, warps) for size, warps in SHORT]
        return tuple(replace(self, tile=tile) for tile in dict.fromkeys(tiles))

    def render(self, site: Site) -> Rendered:
        tile = self.tile or row_tile(width_of(site))
        context = _context(site, tile)
        return Rendered(
            context.function, context.symbol, {f"{context.symbol}.py": (context.TEMPLATE, context)}, str(tile)
        )


SOFTMAX_LOSS_TRITON = SoftmaxLossTriton("softmax_loss_triton", "triton", frozenset({"gpu"}))


@dataclass(frozen=True, slots=True)
class PlainContext:
    """The context of templates/torch/softmax_loss.py.jinja."""

    TEMPLATE: ClassVar[str] = "torch/softmax_loss.py.jinja"
    header: str
    formulas: tuple[str, ...]
    signature: str
    promise: str
    lines: tuple[str, ...]
    returns: str
    uses_torch: bool


@dataclass(frozen=True, slots=True)
class SoftmaxLossTorch(Kernel):
    """The same computation as a plain Torch function: a readable reference, and the implementation for the CPU."""

    computes: ClassVar[type[Op]] = SoftmaxLoss

    def rejects(self, site: Site) -> str | None:
        if "gpu" in site.target.features:
            return f"on {site.target.name} Torch would read the logits three times and keep them in f32"
        return None

    def rank(self, site: Site) -> int:
        return 9

    def render(self, site: Site) -> Rendered:
        function, module = symbol(site)
        op = loss_of(site)
        padding, cast = width_of(site) - op.vocab, "" if site.inputs[0].dtype == "f32" else ".float()"
        z = f"logits[..., :{op.vocab}]" if padding else "logits"
        lines = [f"z = {z}{cast}"] if op.f != "z" else []
        f = torch_text(reread(op.f)) if op.f != "z" else f"{z}{cast}"
        lines += [_line("log_p", f"F.log_softmax({f}, -1)", 4), "target = targets.unsqueeze(-1)"]
        nats = "-log_p.gather(-1, target)"
        returns = f"{nats}.squeeze(-1)"
        if op.reduction == "mean":
            lines.append("grad = log_p.exp().scatter_add_(-1, target, log_p.new_full(target.shape, -1.0))")
            slope = slope_of(op)
            times = [_line("slope", torch_text(reread(slope)), 4)] if slope else []
            lines += [*times, f"grad = {'slope * ' if slope else ''}grad / targets.numel()"]
            lines += [f"grad = F.pad(grad, (0, {padding}))"] if padding else []
            returns = f"{nats}.mean(), grad{'.type_as(logits)' if cast else ''}"
        signature = f"def {function}(logits: Tensor, targets: Tensor) -> {annotation_of(op)}:"
        uses_torch = any("torch." in line for line in lines)
        context = PlainContext(
            header_of(site), formulas_of(op), signature, promise_of(site), tuple(lines), returns, uses_torch
        )
        return Rendered(function, module, {f"{module}.py": (context.TEMPLATE, context)}, "")


SOFTMAX_LOSS_TORCH = SoftmaxLossTorch("softmax_loss_torch", "torch", frozenset())


def loss_of(site: Site) -> SoftmaxLoss:
    assert isinstance(site.node.op, SoftmaxLoss)
    return site.node.op


def width_of(site: Site) -> int:
    width = site.inputs[0].width
    assert isinstance(width, int)
    return width


def slope_of(op: SoftmaxLoss) -> str:
    """Returns the derivative of f with respect to z as text, or "" if it is 1."""
    slope = derive(reread(op.f), "z")
    return "" if not variables(slope) and number(slope) == 1 else str(slope)


def results_of(op: SoftmaxLoss) -> tuple[str, ...]:
    return op.output_labels or ("nats",)


def annotation_of(op: SoftmaxLoss) -> str:
    return "tuple[Tensor, Tensor]" if op.reduction == "mean" else "Tensor"


def header_of(site: Site) -> str:
    logits, targets = (
        unbroken(f"{name} {type}") for name, type in zip(("logits", "targets"), site.inputs, strict=True)
    )
    results = (
        unbroken(f"{name} {type}") for name, type in zip(results_of(loss_of(site)), site.node.types, strict=True)
    )
    return flowed(f"{unbroken(f'{site.label}    ')}{logits}, {targets} -> {', '.join(results)}", "# ", "    ", 88)


def formulas_of(op: SoftmaxLoss) -> tuple[str, ...]:
    """Returns the formulas, one line per value, as lines of a docstring."""
    f = "z" if op.f == "z" else "f"
    nats = f"log(sum(exp({f}))) - {f}[target]"
    lines = [f"nats = {nats}"]
    if op.reduction == "mean":
        slope = slope_of(op)
        grad = f"(softmax({f}) - onehot(target)){f' * ({slope})' if slope else ''} / rows"
        lines = [f"loss = mean({nats})", f"grad = {grad}"]
    first = "z = logits" if op.f == "z" else f"f = {op.f} of z = logits"
    return tuple(flowed(line, "    ", "    ") for line in (first, *lines))


def promise_of(site: Site) -> str:
    """Returns the first line of the function's docstring, with opening quotes."""
    width, dtype, op = width_of(site), site.inputs[0].dtype, loss_of(site)
    results = {"loss": "loss [] f32", "grad": f"grad [..., {width}] {dtype}", "nats": "nats [...] f32"}
    given = f"logits [..., {width}] {dtype}, targets [...] i64"
    return flowed(f'"""{given} -> {", ".join(results[name] for name in results_of(op))}.', "    ")


def _context(site: Site, tile: RowTile) -> LossContext:
    op, width = loss_of(site), width_of(site)
    function, module = symbol(site)
    learns, whole, identity, slope = op.reduction == "mean", tile.columns >= width, op.f == "z", slope_of(op)
    results = ("nats", "grad") if learns else ("nats",)
    tensors = ("logits", "targets", *results)
    sizes = {"V": True, "WIDTH": True, "ROWS": whole, "BLOCK": True}
    sized = [name for name, used in sizes.items() if used]
    rows = ["M"] if learns or whole else []
    settings = {"ROWS": tile.rows, "BLOCK": tile.columns, "WARPS": tile.warps}
    shown = {name: value for name, value in settings.items() if sizes.get(name, True)}
    target = "tl.load(row_ptr + target).to(tl.float32)"
    nats = "logits.new_empty({rows}, dtype=torch.float32)"
    functions = [("bounded", "What becomes of a logit before the softmax.", op.f)] if not identity else []
    functions += [("slope", "Its derivative.", slope)] if slope and learns else []
    return LossContext(
        header=header_of(site),
        summary=f'"""{site.label}: cross-entropy{" and its gradient" if learns else ""} in one kernel.',
        formulas=formulas_of(op),
        how=_how(site, tile, whole),
        namespace=f"specc_{site.module}",
        node=site.label,
        function=function,
        symbol=module,
        vocab=op.vocab,
        width=width,
        dtype=DTYPES[site.inputs[0].dtype],
        element=ELEMENTS[site.inputs[0].dtype],
        settings=f"{', '.join(shown)} = {', '.join(map(str, shown.values()))}",
        functions=tuple((name, doc, _returned(triton_text(reread(text)))) for name, doc, text in functions),
        kernel=listed(
            f"def {function}_kernel(",
            [*(f"{name}_ptr" for name in tensors), *rows, *(f"{n}: tl.constexpr" for n in sized)],
            "):",
        ),
        body=f"triton/softmax_{'rows' if whole else 'chunks'}.py.jinja",
        learns=learns,
        wanted=target if identity else f"bounded({target})",
        read="f" if identity else "z",
        bound=() if identity else ("f = bounded(z)",),
        partial=op.vocab % tile.columns > 0 or op.vocab < width,
        padded=op.vocab < width,
        inside=f"(rows < M)[:, None]{' & (at < WIDTH)' if width % tile.columns else ''}",
        slope=" * slope(z)" if slope else "",
        launch_signature=f"def launch({', '.join(f'{name}: Tensor' for name in tensors)}) -> None:",
        grid="triton.cdiv(m, ROWS)" if whole else "m",
        arguments=", ".join((*tensors, *(["m"] if rows else []), *sized)),
        annotation=annotation_of(op),
        promise=promise_of(site),
        allocated=("grad = torch.empty_like(logits)",) if learns else (),
        tensors=", ".join(tensors),
        returns="nats.mean(), grad" if learns else "nats",
        fake=f"{nats.format(rows='()')}, torch.empty_like(logits)" if learns else nats.format(rows="logits.shape[:-1]"),
    )


def _how(site: Site, tile: RowTile, whole: bool) -> str:
    """Returns a description of the kernel's algorithm."""
    if whole:
        rows = "a row" if tile.rows == 1 else f"{tile.rows} rows"
        words = f"Triton kernel for {site.target.name}: a program holds {rows} in registers and reads them once."
    else:
        words = f"Triton kernel for {site.target.name}: a program takes a row in chunks, with a running maximum"
        words += ", and then once more for the gradient, from L2." if loss_of(site).reduction == "mean" else "."
    return flowed(f"{words} All of it in fp32, each result rounded once where it is stored.")


def _returned(value: str) -> str:
    line = f"    return {value}"
    return line if len(line) <= 110 else f"    return (\n{flowed(value, ' ' * 8)}\n    )"


def _line(name: str, value: str, indent: int) -> str:
    """Returns an assignment for a template to indent. Its first line therefore lacks the indent of the other lines."""
    return assigned(name, value, indent).lstrip()
