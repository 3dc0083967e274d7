"""Softmax cross-entropy of long rows and, in training, its gradient, in CUDA C++. A row of logits is copied to shared
memory once, then read twice."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

from specc.compiler.errors import counted
from specc.compiler.expr import Call, Expr, ExprError, cuda_functions, cuda_text, parse, reread, substitute
from specc.compiler.expr.traverse import rebuild
from specc.compiler.ir.types import BYTES
from specc.compiler.kernels.generated import GeneratedFunction, cuda_files
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.kernels.lines import flowed, unbroken
from specc.compiler.kernels.softmax_loss.softmax_loss import (
    WHOLE,
    Loss,
    gradient_over_logits,
    loss_context,
    loss_function,
    loss_of,
    shares_of,
    slope_of,
    tensors_of,
    width_of,
)
from specc.compiler.kernels.tile import between, power
from specc.compiler.ops.loss import SoftmaxLoss
from specc.compiler.records import record
from specc.compiler.targets import Target

ELEMENTS = {"bf16": "__nv_bfloat16", "f32": "float"}
VECTOR = 16  # bytes that a thread loads at a time; row sizes must be multiples of this number
# Bytes of shared memory that CUDA reserves per block; Target.shared_memory already excludes these bytes for one block
RESERVED = 1024
ALIGNED = 128  # bytes; the alignment of the row in shared memory
MOST_STEPS = 32  # steps per row; with cp.async, each step is a group of copies in flight
WARP = 32  # threads; with bulk copies, a further warp issues the copies
TANH = parse("2 * sigmoid(2 * x) - 1")  # has no branches, unlike tanhf


@record
class StagedTile:
    """The launch configuration of the kernel.

    Attributes:
        threads: Threads per block.
        vectors: Vectors of 16 bytes that each thread holds in registers at a time.
        resident: Blocks per multiprocessor.
        copy: How a row is copied to shared memory: by cp.async in each thread (`async`), or by TMA (`bulk`).
        persistent: Whether a block processes several rows. Such a block copies the next row while it writes the current
            row.

    Raises:
        ValueError: If a field is out of its bounds.
    """

    threads: int
    vectors: int
    resident: int
    copy: Literal["async", "bulk"]
    persistent: bool = True

    def __post_init__(self) -> None:
        power("threads", self.threads, 128, 512)
        power("vectors", self.vectors, 1, 8)
        between("resident", self.resident, 1, 8)
        between("threads x resident", self.threads * self.resident, 128, 1024)

    def __str__(self) -> str:
        words = [f"{self.threads} threads x {self.vectors}", f"{self.copy} copies"]
        words += [f"{self.resident} a multiprocessor"] if self.resident > 1 else []
        return ", ".join([*words, *([] if self.persistent else ["one row per block"])])


# Threads, vectors, blocks per multiprocessor, persistent; the most promising first. Each candidate is measured with
# every kind of copy that the target supports.
CANDIDATES = (
    (512, 2, 2, False), (512, 1, 2, False), (256, 2, 2, False), (256, 4, 2, False), (512, 2, 2, True),
    (512, 1, 2, True), (256, 4, 2, True), (512, 2, 1, True), (512, 4, 1, True),
)  # fmt: skip


class StagedContext(NamedTuple):
    """The context of templates/cuda/softmax_loss.cu.jinja.

    The texts in the field `passes` and in all later fields depend on whether the kernel computes a gradient, and on
    whether a block processes several rows. A token may have additional targets besides the next token.

    Attributes:
        how: A description of the kernel's algorithm.
        copiers: The number of additional threads that copy rows.
        prelude: Functions that the code in `functions` calls.
        functions: The name, comment and body of each device function of a logit.
        parts: The templates of the device code, in order.
        begun: Lines that load a row's additional targets, and the logits of these targets.
        value: Lines that write the loss of a row.
        parameter: The parameter of the device function `differentiate` that scales the exponentials. Empty if the
            factor is 1.
        argument: The argument that is passed for `parameter`.
        factor: The factor of the exponentials, as an expression.
        ended: Lines that write the gradient with respect to the logits of the targets.
    """

    op: GeneratedFunction
    loss: Loss
    how: str
    arch: str
    element: str
    tile: StagedTile
    copiers: int
    prelude: str
    functions: tuple[tuple[str, str, str], ...]
    parts: tuple[str, ...]
    begun: tuple[str, ...]
    value: tuple[str, ...]
    parameter: str
    argument: str
    factor: str
    ended: tuple[str, ...]
    passes: str
    row_parameters: str
    row_call: str
    waited: str
    kernel_parameters: str
    pointers: str
    launched: str
    blocks: str
    aliasing: str


class LauncherContext(NamedTuple):
    """The context of templates/cuda/softmax_loss.py.jinja. `pointers` are the arguments of the compiled function. The
    statement `refusal` raises an exception if this function returns an error code."""

    op: GeneratedFunction
    loss: Loss
    how: str
    pointers: str
    pointer_count: int
    refusal: str


@record
class SoftmaxLossCuda(Kernel):
    """Accepts rows that fit into shared memory but not into registers. `tile` is the measured tile. If `tile` is None,
    the kernel uses the result of `staged_tile`.

    The kernel first multiplies logits by log2(e). A row with a finite logit beyond 2.3e38 therefore gives NaN.
    """

    TILE: ClassVar[type | None] = StagedTile
    tile: StagedTile | None = None

    def rejects(self, site: Site) -> str | None:
        dtype, width, op = site.inputs[0].dtype, width_of(site), loss_of(site)
        if dtype not in ELEMENTS:
            return f"reads logits in bf16 or f32; in {dtype} the gradient of a mean underflows"
        if width <= WHOLE:
            return f"is for rows of more than {WHOLE} columns, which do not fit into registers; these have {width}"
        if width * BYTES[dtype] % VECTOR:
            return f"copies {VECTOR} bytes at a time; a row of {width} columns has {width * BYTES[dtype]}"
        try:
            [cuda_text(_branchless(reread(text))) for text in (op.f, slope_of(op) or "1", op.per_token)]
        except ExprError as error:
            return f"cannot print {op.f} or {op.per_token}: {error.message}"
        tile = self.tile or staged_tile(site)
        if tile.copy == "bulk" and "tma" not in site.target.features:
            return f"has bulk copies in its tile, {tile}; {site.target.name} has no tma"
        if (steps := _steps(site, tile)) > MOST_STEPS:
            return f"takes a row in at most {MOST_STEPS} steps; {tile} needs {steps} for {width} columns"
        needed = shared_bytes(site, tile)
        if needed > _room(site.target, tile.resident):
            where = f"{site.target.name} has {_room(site.target, tile.resident)} a block"
            where += f" where {tile.resident} share a multiprocessor" if tile.resident > 1 else ""
            return f"keeps a row in shared memory; one of {width} columns in {dtype} takes {needed} bytes, {where}"
        return None

    def rank(self, site: Site) -> int:
        # On Hopper, this kernel ranks before the Triton kernel: for 50,257 columns, it took 0.79 of the Triton kernel's
        # time.
        return -1 if "tma" in site.target.features else 1

    def variants(self, site: Site) -> tuple[Kernel, ...]:
        copies: tuple[Literal["bulk", "async"], ...] = ("bulk", "async")
        tiles = (StagedTile(t, v, r, copy, persistent) for t, v, r, persistent in CANDIDATES for copy in copies)
        kernels = (replace(self, tile=tile) for tile in tiles)
        return tuple(kernel for kernel in kernels if kernel.rejects(site) is None)

    def written_over(self, site: Site) -> Mapping[int, int]:
        return gradient_over_logits(site)

    def render(self, site: Site) -> Rendered:
        tile = self.tile or staged_tile(site)
        op, loss = loss_function(site), loss_context(site)
        pointers = [f"{name}.data_ptr()" for name in tensors_of(site)]
        how, passed = flowed(_how(site, tile)), flowed(", ".join(pointers) + ",", " " * 8)
        texts = ('f"{NODE}: CUDA refuses {m} rows: "', f'f"{{code.{op.function}_status(status).decode()}}"')
        refusal = "\n".join((" " * 8 + "raise RuntimeError(", *(" " * 12 + text for text in texts), " " * 8 + ")"))
        launcher = LauncherContext(op, loss, how, passed, len(pointers) + 1, refusal)
        source = ("cuda/softmax_loss.cu.jinja", _source(site, tile, op, loss))
        return cuda_files(op, source, ("cuda/softmax_loss.py.jinja", launcher), str(tile))


SOFTMAX_LOSS_CUDA = SoftmaxLossCuda("softmax_loss_cuda", "cuda", frozenset({"gpu", "cp_async"}), SoftmaxLoss)


def staged_tile(site: Site) -> StagedTile:
    """Returns the default tile. The copies use TMA if the target has TMA.

    If shared memory has room for two rows, each block processes one row. Two blocks then share a multiprocessor: one
    computes while the other waits for its copy.

    Otherwise, a persistent block processes many rows. In shared memory, parts of the next row replace the parts of the
    current row that the block no longer needs.
    """
    copy: Literal["bulk", "async"] = "bulk" if "tma" in site.target.features else "async"
    two = StagedTile(512, 2, 2, copy, False)
    return two if shared_bytes(site, two) <= _room(site.target, 2) else replace(two, resident=1, persistent=True)


def shared_bytes(site: Site, tile: StagedTile) -> int:
    """Returns the bytes of shared memory per block.

    Shared memory holds one row, and sums per warp for the current row and the next row. If TMA copies the rows, shared
    memory also holds two barriers for each step in which a part of a row is copied.
    """
    barriers = 16 * _steps(site, tile) if tile.copy == "bulk" else 0
    return _bytes(site) + -(-(16 * (tile.threads // WARP) + barriers) // ALIGNED) * ALIGNED


def _bytes(site: Site) -> int:
    return width_of(site) * BYTES[site.inputs[0].dtype]


def _steps(site: Site, tile: StagedTile) -> int:
    return -(-_bytes(site) // (tile.threads * tile.vectors * VECTOR))


def _room(target: Target, resident: int) -> int:
    return (target.shared_memory + RESERVED) // resident - RESERVED


def _branchless(expr: Expr) -> Expr:
    expr = rebuild(expr, _branchless)
    return substitute(TANH, {"x": expr.args[0]}) if isinstance(expr, Call) and expr.function == "tanh" else expr


def _source(site: Site, tile: StagedTile, op: GeneratedFunction, loss: Loss) -> StagedContext:
    learns, persistent = loss.learns, tile.persistent
    texts = (loss_of(site).f, slope_of(loss_of(site)) or "1")[: 1 + learns]
    bodies = [cuda_text(_branchless(reread(text))) for text in texts]
    functions = (
        ("bounded", "Returns the value of a logit in the softmax."),
        ("slope", "Returns the derivative of `bounded`."),
    )[: 1 + learns]
    kind = "persistent" if persistent else "once"
    parts = (
        f"elements_{site.inputs[0].dtype}",
        f"copies_{tile.copy}_{kind}",
        "terms",
        *(["gradient"] if learns else []),
    )
    results = ("nats", "grad") if learns else ("nats",)
    counted_rows = ["m"] if learns or persistent else []
    types = {"logits": "Element const*", "targets": "int64_t const*", "nats": "float*", "grad": "Element*", "m": "int"}
    types |= dict.fromkeys(loss.targets, "int64_t const*") | dict.fromkeys(loss_of(site).weights, "float const*")
    further = (*loss.targets, *loss_of(site).weights)
    row = ["Copies& copies", "uint4 const* row", "float2* parts", "int64_t at", "int64_t target"]
    row += ["int turn", "Element const* next"] if persistent else []
    row += [f"{types[name]} {name}" for name in ("logits", *loss.targets)]
    row += [f"float {name}" for name in loss_of(site).weights]
    row += [f"{types[name]} {name}" for name in (*results, *(["m"] if learns else []))]
    call = ["copies", "row", "parts[turn]", "at", "current", "turn", "next"]
    call = call if persistent else ["copies", "row", "parts", "blockIdx.x", "target"]
    call += ["logits", *loss.targets, *(f"*{name}" for name in loss_of(site).weights)]
    call += [*results, *(["m"] if learns else [])]
    kernel = ["logits", "targets", *further, *results, *counted_rows]
    pointers = [f"void{'' if name in results else ' const'}* {name}" for name in kernel if name != "m"]
    value, argument, ended = _terms(loss_of(site), learns)
    return StagedContext(
        op=op,
        loss=loss,
        how=flowed(f"{_how(site, tile)} All of it in fp32, each result rounded once where it is stored.", "// "),
        arch=site.target.nvcc,
        element=ELEMENTS[site.inputs[0].dtype],
        tile=tile,
        copiers=WARP if tile.copy == "bulk" else 0,
        prelude=cuda_functions(bodies),
        functions=tuple(
            (name, comment, flowed(f"return {body};", "  ", "    "))
            for (name, comment), body in zip(functions, bodies, strict=True)
        ),
        parts=tuple(f"cuda/softmax_{part}.cu.jinja" for part in (*parts, "loss_row", f"rows_{kind}")),
        begun=tuple(line for name in loss_of(site).further for line in _begun(name)),
        value=value,
        parameter=", float share" if argument else "",
        argument=argument,
        factor=" * share" if argument else "",
        ended=ended,
        passes=", then its gradient" if learns else "",
        row_parameters=flowed(", ".join(map(unbroken, row)), " " * 4),
        row_call=flowed(f"softmax_row({', '.join(call)});", " " * (4 if persistent else 2), "    "),
        waited="step, turn" if persistent else "step",
        kernel_parameters=flowed(", ".join(unbroken(f"{types[name]} {name}") for name in kernel) + ") {", " " * 4),
        pointers=flowed(", ".join(["int m", *map(unbroken, pointers), unbroken("cudaStream_t stream) {")]), " " * 4),
        launched=flowed(f"void* arguments[] = {{{', '.join(f'&{name}' for name in kernel)}}};", "  ", "    "),
        blocks="processors * kResident < m ? processors * kResident : m" if persistent else "m",
        aliasing=" `grad` may be `logits`." if learns else "",
    )


def _begun(name: str) -> tuple[str, ...]:
    target, known, column = f"target_{name}", f"known_{name}", f"column_{name}"
    return (
        f"int64_t const {target} = targets_{name}[at];",
        f"bool const {known} = {target} >= 0 && {target} < V;",
        f"int const {column} = {known} ? static_cast<int>({target}) : 0;",
        f"float const z_{name} = loaded(logits + at * WIDTH + {column});",
    )


def _terms(op: SoftmaxLoss, learns: bool) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Returns three parts of the code for a row: the lines that write the loss, the factor of the exponentials (empty
    if the factor is 1), and the lines that write the gradients of the targets' logits.
    """
    sum_of_row = "logf(sum) + kLn2 * fmaf(-whole.x, kLog2e, base)"
    if op.per_token == "nats":
        p = "float const p = __fdividef(power_of_two(fmaf(f, kLog2e, -base)), sum);"
        written = "if (owner) slopes[column] = static_cast<Element>((p - 1.0f) / rows * slope(z));"
        return (f"if (owner) nats[at] = {sum_of_row} + (whole.x - f);",), "", (p, written)
    share, hits = shares_of(op)
    names = {"nats": "loss", **{f"known_{name}": f"static_cast<float>(known_{name})" for name in op.further}}
    value = [f"float const rest = {sum_of_row};", "float const lse = rest + whole.x, loss = rest + (whole.x - f);"]
    for name in op.further:
        value.append(f"float const f_{name} = bounded(z_{name});")
        value.append(f"float const nats_{name} = known_{name} ? rest + (whole.x - f_{name}) : 0.0f;")
    value.append(_statement(f"if (owner) nats[at] = {cuda_text(reread(op.per_token), names)};"))
    if not learns:
        return tuple(value), "", ()
    value.append(_statement(f"float const share = {cuda_text(share, names)};"))
    ended = tuple(
        f"float const hit{end} = {f'known{end} ? {cuda_text(hit)} : 0.0f' if end else cuda_text(hit)};"
        for end, hit in zip(_ends(op), hits, strict=True)
    )
    return tuple(value), ", share", (*ended, *(line for end in _ends(op) for line in _ended(op, end)))


def _ends(op: SoftmaxLoss) -> tuple[str, ...]:
    return ("", *(f"_{name}" for name in op.further))


def _ended(op: SoftmaxLoss, end: str) -> tuple[str, ...]:
    """Returns the lines that write the gradient of one target's logit. `end` is the suffix of the target's variables.
    Several targets may be the same token, and then share a logit."""
    same = [f" + (column{other} == column{end} ? hit{other} : 0.0f)" for other in _ends(op) if other != end]
    power = f"power_of_two(fmaf(f{end}, kLog2e, -base))"
    owner = f"known{end} && threadIdx.x == column{end} / kPer % kThreads" if end else "owner"
    return (
        _statement(f"float const p{end} = __fdividef({power}, sum) * share - (hit{end}{''.join(same)});"),
        _statement(f"if ({owner}) slopes[column{end}] = static_cast<Element>(p{end} / rows * slope(z{end}));"),
    )


def _statement(text: str) -> str:
    return flowed(text, "  ", "    ").lstrip()


def _how(site: Site, tile: StagedTile) -> str:
    copied = "TMA copies" if tile.copy == "bulk" else "cp.async copies"
    words = f"CUDA C++ for {site.target.name}: {copied} a row to shared memory, {counted(_steps(site, tile), 'step')}"
    words += " of it at a time, with a running maximum as they come"
    words += ", and then once more for the gradient." if loss_of(site).reduction == "mean" else "."
    if not tile.persistent:
        return words
    return f"{words} Each step makes room for the next row's."
