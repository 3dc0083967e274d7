"""Softmax cross-entropy of logits and, in training, its gradient. There is a Triton kernel, and plain Torch code for
the CPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

from specc.compiler.errors import counted
from specc.compiler.expr import (
    Binary,
    Const,
    Expr,
    ExprError,
    Var,
    derive,
    number,
    reread,
    simplify,
    torch_text,
    triton_text,
    variables,
)
from specc.compiler.ir.types import DTYPES, TensorType
from specc.compiler.kernels.generated import (
    TRITON_DTYPES,
    GeneratedFunction,
    constants,
    generated_function,
    number_of,
    python_file,
)
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, symbol, unless_cpu
from specc.compiler.kernels.lines import flowed, listed, nested, returned
from specc.compiler.kernels.tile import MOST_WARPS, between, power
from specc.compiler.ops.loss import SoftmaxLoss
from specc.compiler.records import record

LOGITS = ("bf16", "f32")
WHOLE = 8192  # columns; longer rows do not fit in registers
LARGEST = 1 << 17  # elements per tile
TILE = 4096  # elements that a program instance holds: 32 per thread; each element needs two to four floats


@record
class RowTile:
    """The work of one program instance: its `warps` warps process `rows` rows, and read `columns` columns at a time.

    If `columns` covers whole rows, the rows stay in registers. Raises ValueError if a field is out of its bounds.
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
    """Returns the default tile for rows of `width` columns.

    A row that fits into registers is read once. If rows are short, a program instance processes several rows. A row
    that does not fit into registers is read twice, and each thread loads 16 bytes of bf16 at a time. The second read
    must come from L2, so few rows may be in flight. A program instance therefore has 16 warps, which allows at most
    four program instances per multiprocessor.
    """
    columns = 1 << (width - 1).bit_length()
    if columns > WHOLE:
        return RowTile(1, TILE, 16)
    return RowTile(max(1, TILE // columns), columns, 8 if columns > TILE else 4)


# Tiles worth measuring: (columns, warps) for long rows, and (elements, warps) for rows in registers.
LONG = ((4096, 16), (8192, 16), (4096, 8), (8192, 8), (8192, 32), (16384, 16), (16384, 32), (2048, 8))
SHORT = ((4096, 4), (4096, 8), (2048, 4), (8192, 8), (2048, 2), (1024, 4), (1024, 1), (8192, 16))


class Loss(NamedTuple):
    """The values for templates/torch/softmax_op.py.jinja. The templates of the Triton kernel and of the CUDA kernel
    include this template.

    The fake implementation of a custom op returns outputs without values, for Torch's tracing. A token may have
    additional targets besides the next token.

    Attributes:
        learns: Whether the kernel also computes the gradient.
        vocab: The number of logits per row.
        width: The number of columns per row: the logits and their padding.
        dtype: The dtype of the logits.
        op: The name of the custom op. In training, the op overwrites the logits with their gradient.
        launch: The call of `launch` in the op.
        returns: The expression that the op returns.
        fake: The output shape of the fake implementation, as text.
        targets: The parameters of the op for additional targets.
        signature: The `def` line of the op in training.
        fake_signature: The `def` line of the fake implementation of this op.
        returned: The return statement of the function that calls the op.
    """

    learns: bool
    vocab: int
    width: int
    dtype: str
    op: str
    launch: str
    returns: str
    fake: str
    targets: tuple[str, ...]
    signature: str
    fake_signature: str
    returned: str


class LossContext(NamedTuple):
    """The context of templates/triton/softmax_loss.py.jinja. `f` is a logit after the function of the logits, such as
    a softcap.

    Attributes:
        how: A description of the kernel's algorithm.
        functions: The name, docstring and return statement of each function of a logit.
        body: The template of the kernel's body.
        wanted: The value `f` of the target, as an expression.
        read: The name of a loaded logit.
        bound: The line that computes `f` from a loaded logit, if `f` is not the logit itself.
        partial: Whether a tile may have columns without logits.
        padded: Whether rows have padding after the logits.
        inside: The mask of tile elements inside the tensor of logits, as an expression.
        slope: The text of the multiplication by the derivative of `f`. Empty if the derivative is 1.
        begun: Lines that load a token's additional targets, and the logits of these targets.
        weighted: Lines that load the weights of a weighted loss, and compute the operands of its expression.
        value: The loss of a token, as an expression.
        share: The factor of the exponentials in the gradient, as an expression.
        scaled: Lines that scale the gradients of the targets.
        further: Lines that compute the gradients of the additional targets in a tile.
    """

    op: GeneratedFunction
    loss: Loss
    how: str
    element: str
    settings: str
    functions: tuple[tuple[str, str, str], ...]
    kernel: str
    body: str
    wanted: str
    read: str
    bound: tuple[str, ...]
    partial: bool
    padded: bool
    inside: str
    slope: str
    begun: tuple[str, ...]
    weighted: tuple[str, ...]
    value: str
    share: str
    scaled: tuple[str, ...]
    further: tuple[str, ...]
    grid: str
    arguments: str


@record
class SoftmaxLossTriton(Kernel):
    """Accepts any vocabulary size and any function of the logits. `tile` is the measured tile. If `tile` is None, the
    kernel uses the result of `row_tile`."""

    TILE: ClassVar[type | None] = RowTile
    tile: RowTile | None = None

    def rejects(self, site: Site) -> str | None:
        dtype = site.inputs[0].dtype
        if dtype not in LOGITS:
            return f"reads logits in bf16 or f32; in {dtype} the gradient of a mean underflows"
        try:
            triton_text(reread(loss_of(site).f)), triton_text(derive(reread(loss_of(site).f), "z"))
        except ExprError as error:
            return f"cannot print {loss_of(site).f}: {error.message}"
        if self.tile is not None and self.tile.rows > 1 and self.tile.columns < width_of(site):
            return f"takes several rows at a time only if they fit; {self.tile} does not hold {width_of(site)} columns"
        return None

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        columns = 1 << (width_of(site) - 1).bit_length()
        tiles = [RowTile(1, *tile) for tile in LONG]
        if columns <= WHOLE:
            tiles = [RowTile(max(1, size // columns), columns, warps) for size, warps in SHORT]
        return tuple(replace(self, tile=tile) for tile in dict.fromkeys(tiles))

    def written_over(self, site: Site) -> Mapping[int, int]:
        return gradient_over_logits(site)

    def render(self, site: Site) -> Rendered:
        tile = self.tile or row_tile(width_of(site))
        context = _context(site, tile)
        return python_file(context.op, "triton/softmax_loss.py.jinja", context, str(tile))


SOFTMAX_LOSS_TRITON = SoftmaxLossTriton("softmax_loss_triton", "triton", frozenset({"gpu"}), SoftmaxLoss)


class PlainContext(NamedTuple):
    """The context of templates/torch/softmax_loss.py.jinja."""

    op: GeneratedFunction
    lines: tuple[str, ...]
    returns: str
    uses_torch: bool
    uses_functional: bool


class SoftmaxLossTorch(Kernel):
    """Softmax cross-entropy and its gradient as a plain Torch function: a readable reference, and the kernel of the
    CPU."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        return unless_cpu(site, "would read the logits three times and keep them in f32")

    def workspace(self, site: Site) -> tuple[TensorType, ...]:
        op, wide = loss_of(site), site.inputs[0].dtype != "f32"
        if op.reduction == "none":
            count = 1 + (op.f != "z" or wide)  # log_p, and f(z)
        else:
            count = (op.per_token == "nats" or op.f != "z" or wide) + (op.f != "z" and wide)  # log_p or f(z), and z
            count += 3 if slope_of(op) else 1  # grad; slope, and the product of both
        logits = site.inputs[0]
        return (replace(logits, shape=(*logits.shape[:-1], op.vocab), dtype="f32"),) * count

    def render(self, site: Site) -> Rendered:
        op = loss_of(site)
        padding, cast = width_of(site) - op.vocab, "" if site.inputs[0].dtype == "f32" else ".float()"
        z = f"logits[..., :{op.vocab}]" if padding else "logits"
        lines = [f"z = {z}{cast}"] if op.f != "z" else []
        f = torch_text(reread(op.f)) if op.f != "z" else f"{z}{cast}"
        lines += [nested("log_p", f"F.log_softmax({f}, -1)"), "target = targets.unsqueeze(-1)"]
        nats = "-log_p.gather(-1, target)"
        returns = f"{nats}.squeeze(-1)"
        if op.reduction == "mean":
            if op.per_token == "nats":
                lines.append("grad = log_p.exp().scatter_add_(-1, target, log_p.new_full(target.shape, -1.0))")
            else:
                lines, nats = [*lines[:-2], *_weighted_lines(op, f)], "loss"
            slope = slope_of(op)
            times = [nested("slope", torch_text(reread(slope)))] if slope else []
            lines += [*times, f"grad = {'slope * ' if slope else ''}grad / targets.numel()"]
            lines += [f"grad = F.pad(grad, (0, {padding}))"] if padding else []
            returns = f"{nats}.mean(), grad{'.type_as(logits)' if cast else ''}"
        uses_torch, uses_functional = (any(name in line for line in lines) for name in ("torch.", "F."))
        context = PlainContext(loss_function(site), tuple(lines), returns, uses_torch, uses_functional)
        return python_file(context.op, "torch/softmax_loss.py.jinja", context)


SOFTMAX_LOSS_TORCH = SoftmaxLossTorch("softmax_loss_torch", "torch", computes=SoftmaxLoss)


def _weighted_lines(op: SoftmaxLoss, f: str) -> list[str]:
    share, (hit, *hits) = shares_of(op)
    lines = [
        nested("f", f),
        "lse = f.logsumexp(-1, keepdim=True)",
        "target = targets.unsqueeze(-1)",
        "nats = lse - f.gather(-1, target)",
    ]
    for name in op.further:
        lines.append(f"known_{name} = targets_{name}.unsqueeze(-1) >= 0")
        lines.append(f"target_{name} = targets_{name}.unsqueeze(-1).clamp(min=0)")
        lines.append(f"nats_{name} = (lse - f.gather(-1, target_{name})).where(known_{name}, 0)")
    lines.append(nested("loss", torch_text(reread(op.per_token))))
    lines.append(nested("share", torch_text(share)))
    lines.append("grad = (f - lse).exp() * share")
    lines.append(f"grad = grad.scatter_add(-1, target, torch.zeros_like(lse) - {torch_text(hit)})")
    for name, other in zip(op.further, hits, strict=True):
        times = torch_text(Binary("*", other, Var(f"known_{name}")))
        lines.append(f"grad = grad.scatter_add(-1, target_{name}, torch.zeros_like(lse) - {times})")
    return lines


def shares_of(op: SoftmaxLoss) -> tuple[Expr, tuple[Expr, ...]]:
    """Returns the factor of the softmax, and the factor of each one-hot target, in the gradient of a token's loss.

    Let lse be the logsumexp of f, and nats = lse - f[target]. The loss E has the partial derivatives E_nats and E_lse.
    Then dE/df = (E_nats + E_lse) softmax - E_nats onehot. An additional target `n` adds a term to the factor of the
    softmax. This term contains `known_n`: 1 if the token has the target, otherwise 0.
    """
    loss = reread(op.per_token)
    targets = ("nats", *(f"nats_{name}" for name in op.further))
    hits = tuple(derive(loss, name) for name in targets)
    linear = not {"lse", *targets}.intersection(name for hit in hits for name in variables(hit))
    assert linear, "the loss of a token is linear in the losses of its targets"
    share = Binary("+", hits[0], derive(loss, "lse"))
    for name, hit in zip(op.further, hits[1:], strict=True):
        share = Binary("+", share, Binary("*", hit, Var(f"known_{name}")))
    return simplify(share), hits


def gradient_over_logits(site: Site) -> Mapping[int, int]:
    """Returns `Kernel.written_over` of a kernel of templates/torch/softmax_op.py.jinja."""
    return {1: 0} if loss_of(site).reduction == "mean" else {}


def loss_of(site: Site) -> SoftmaxLoss:
    assert isinstance(site.node.op, SoftmaxLoss)
    return site.node.op


def width_of(site: Site) -> int:
    return number_of(site.inputs[0].width)


def slope_of(op: SoftmaxLoss) -> str:
    """Returns the derivative of f with respect to z as text. The result is empty if the derivative is 1."""
    slope = derive(reread(op.f), "z")
    return "" if not variables(slope) and number(slope) == 1 else str(slope)


def loss_function(site: Site) -> GeneratedFunction:
    op = loss_of(site)
    inputs = dict(zip(("logits", *op.targets, *op.weights), site.inputs, strict=True))
    outputs = dict(zip(op.output_labels or ("nats",), site.node.types, strict=True))
    logits = f"[..., {width_of(site)}]"
    shapes = {"logits": logits, "targets": "[...]", "loss": "[]", "grad": logits, "nats": "[...]"}
    shapes |= dict.fromkeys(op.targets, "[...]") | dict.fromkeys(op.weights, "[]")
    gradient = " and its gradient" if op.reduction == "mean" else ""
    summary = f"{site.label}: cross-entropy{gradient} in one kernel."
    return generated_function(site, inputs, outputs, shapes, summary, _formulas(op), launched=tensors_of(site))


def tensors_of(site: Site) -> tuple[str, ...]:
    """Returns the names of the tensors that a kernel reads and writes. The outputs include the loss per row in nats."""
    op = loss_of(site)
    return ("logits", *op.targets, *op.weights, "nats", *(["grad"] if op.reduction == "mean" else []))


def loss_context(site: Site) -> Loss:
    op = loss_of(site)
    learns = op.reduction == "mean"
    names = ("logits", *op.targets, *op.weights)
    parameters = [f"{name}: Tensor" for name in names]
    return Loss(
        learns=learns,
        vocab=loss_of(site).vocab,
        width=width_of(site),
        dtype=DTYPES[site.inputs[0].dtype],
        op="differentiated" if learns else symbol(site)[0],
        launch=listed("launch(", ["logits" if name == "grad" else name for name in tensors_of(site)], ")", 12),
        returns="nats.mean()" if learns else "nats",
        fake="()" if learns else "logits.shape[:-1]",
        targets=op.targets[1:],
        signature=listed("def differentiated(", parameters, ") -> Tensor:"),
        fake_signature=listed("def _(", parameters, ") -> Tensor:"),
        returned=listed("return differentiated(", names, "), logits", 4),
    )


def _formulas(op: SoftmaxLoss) -> tuple[str, ...]:
    f = "z" if op.f == "z" else "f"
    nats = f"log(sum(exp({f}))) - {f}[target]"
    lines = [f"nats = {nats}"]
    if op.per_token != "nats":
        slope, (share, hits) = slope_of(op), shares_of(op)
        ends = [f"onehot({name.replace('targets', 'target', 1)})" for name in op.targets]
        onehots = [end if hit == Const(1.0) else f"({hit}) * {end}" for end, hit in zip(ends, hits, strict=True)]
        grad = f"(({share}) * softmax({f}) - {' - '.join(onehots)}){f' * ({slope})' if slope else ''} / rows"
        lines = [f"lse = log(sum(exp({f})))", f"nats = lse - {f}[target]"]
        for name in op.further:
            lines += [
                f"nats_{name} = lse - {f}[target_{name}], or 0 without a target; known_{name} = 1 with it, else 0"
            ]
        lines += [f"loss = mean({op.per_token})", f"grad = {grad}"]
    elif op.reduction == "mean":
        slope = slope_of(op)
        grad = f"(softmax({f}) - onehot(target)){f' * ({slope})' if slope else ''} / rows"
        lines = [f"loss = mean({nats})", f"grad = {grad}"]
    first = "z = logits" if op.f == "z" else f"f = {op.f} of z = logits"
    return first, *lines


def _context(site: Site, tile: RowTile) -> LossContext:
    loss, width, op, tensors = loss_of(site), width_of(site), loss_function(site), tensors_of(site)
    learns, whole, identity, slope = "grad" in tensors, tile.columns >= width, loss.f == "z", slope_of(loss)
    sized = ["V", "WIDTH", *(["ROWS"] if whole else []), "BLOCK"]
    rows = ["M"] if learns or whole else []
    settings = {"ROWS": tile.rows} if whole else {}
    settings |= {"BLOCK": tile.columns, "WARPS": tile.warps}
    target = "tl.load(row_ptr + target).to(tl.float32)"
    functions = [("bounded", "Returns the value of a logit in the softmax.", loss.f)] if not identity else []
    functions += [("slope", "Returns the derivative of `bounded`.", slope)] if slope and learns else []
    nats, (share, hits) = "tl.log(total) + (most - wanted)", shares_of(loss)
    plain, target_share = loss.per_token == "nats", triton_text(hits[0])
    losses = [f"nats_{n} = tl.where(known_{n}, tl.log(total) + (most - wanted_{n}), 0.0)" for n in loss.further]
    losses.append(nested("loss", triton_text(reread(loss.per_token))))
    lse = ["lse = tl.log(total) + most"] * ("lse" in variables(reread(loss.per_token)))
    scaled = [] if target_share == "1.0" else [f"scale *= {target_share}"]
    scales = [f"scale_{n} = scale * {triton_text(hit)}" for n, hit in zip(loss.further, hits[1:], strict=True)]
    shares = [f"tl.where({f'hit_{n}' if whole else f'at == target_{n}'}, scale_{n}, 0.0)" for n in loss.further]
    known = {f"known_{name}": f"known_{name}.to(tl.float32)" for name in loss.further}
    loads = tuple(f"{name} = tl.load({name}_ptr)" for name in loss.weights)
    pointers, sizes = [f"{name}_ptr" for name in tensors], [f"{name}: tl.constexpr" for name in sized]
    return LossContext(
        op=op,
        loss=loss_context(site),
        how=_how(site, tile, whole),
        element=TRITON_DTYPES[site.inputs[0].dtype],
        settings=constants(settings),
        functions=tuple((name, doc, returned(triton_text(reread(text)))) for name, doc, text in functions),
        kernel=listed(f"def {op.function}_kernel(", [*pointers, *rows, *sizes], "):"),
        body=f"triton/softmax_{'rows' if whole else 'chunks'}.py.jinja",
        wanted=target if identity else f"bounded({target})",
        read="f" if identity else "z",
        bound=() if identity else ("f = bounded(z)",),
        partial=loss.vocab % tile.columns > 0 or loss.vocab < width,
        padded=loss.vocab < width,
        inside=f"(rows < M)[:, None]{' & (at < WIDTH)' if width % tile.columns else ''}",
        slope=" * slope(z)" if slope else "",
        begun=tuple(line for name in loss.further for line in _begun(loss, name, whole)),
        weighted=()
        if plain
        else (*loads, *lse, f"nats = {nats}", *losses, nested("factor", triton_text(share, known))),
        value=nats if plain else "loss",
        share="scale / total" if plain else "scale / total * factor",
        scaled=(*scales, *scaled),
        further=tuple(f"further {'+=' if i else '='} {value}" for i, value in enumerate(shares)),
        grid="triton.cdiv(m, ROWS)" if whole else "m",
        arguments=flowed(f"{', '.join((*tensors, *(['m'] if rows else []), *sized))},", " " * 8),
    )


def _begun(loss: SoftmaxLoss, name: str, whole: bool) -> tuple[str, ...]:
    loaded = "rows, mask=rows < M, other=-1" if whole else "row"
    target, known = f"target_{name}", f"known_{name}"
    lines = (f"{target} = tl.load(targets_{name}_ptr + {loaded})", f"{known} = ({target} >= 0) & ({target} < V)")
    if whole:
        hit = f"hit_{name} = at == tl.where({known}, {target}, -1).to(tl.int32)[:, None]"
        return (*lines, hit, f"wanted_{name} = tl.sum(tl.where(hit_{name}, f, 0.0), 1)")
    logit = f"tl.load(row_ptr + tl.maximum({target}, 0)).to(tl.float32)"
    return (
        *lines,
        f"{target} = tl.where({known}, {target}, -1).to(tl.int32)",
        f"wanted_{name} = {logit if loss.f == 'z' else f'bounded({logit})'}",
    )


def _how(site: Site, tile: RowTile, whole: bool) -> str:
    if whole:
        rows = "a row" if tile.rows == 1 else f"{tile.rows} rows"
        words = f"Triton kernel for {site.target.name}: a program holds {rows} in registers and reads them once."
    else:
        words = f"Triton kernel for {site.target.name}: a program takes a row in chunks, with a running maximum"
        words += ", and then once more for the gradient, from L2." if loss_of(site).reduction == "mean" else "."
    return flowed(f"{words} All of it in fp32, each result rounded once where it is stored.")
