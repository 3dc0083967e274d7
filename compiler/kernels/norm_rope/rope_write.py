"""Two kernels for the op `RopeWrite`, in Triton and in plain Torch. `RopeWrite` rotates rows and writes the results to
a cache."""

import json
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from specc.compiler.ir.types import DTYPES, TensorType
from specc.compiler.kernels.epilogue import FLOATS
from specc.compiler.kernels.gemm.rows import DEPENDENT_LAUNCH
from specc.compiler.kernels.generated import (
    TRITON_DTYPES,
    GeneratedFunction,
    constants,
    generated_function,
    number_of,
    python_file,
)
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, unless_cpu
from specc.compiler.kernels.lines import flowed, listed, nested, unbroken
from specc.compiler.ops.caches.key_value_cache import LARGEST
from specc.compiler.ops.decoding.rope_write import RopeWrite

WIDEST = 1024  # the most channels of a head; one program instance holds a head
HEAD = "C, PAIRS, STEP, APART, BLOCK_R, BLOCK_C"  # arguments of the functions that process one head


class Layout(NamedTuple):
    """The layout of a cache: where the rows of a token are stored.

    A cache tensor is [outer, inner, G, width]. The Triton lines compute `outer` and `inner` from `row`, the index of a
    token among all tokens. The Torch call writes x to `cache`.

    Attributes:
        settings: The constants that the lines read.
        sizes: The run-time sizes that the lines read, with their values at the launch.
        lines: The Triton lines that compute `outer`, `inner`, and `token`, the row of the token's angles.
        tokens: The leading dims of q, k and v, as text.
        slots: The leading dims of the cache tensors, as text.
        known: The line that assigns the variables in `tokens` and `slots`. The line also assigns t, the number of rows
            of angles.
        call: The Torch call, a format string with the fields `{cache}` and `{x}`.
        helpers: The templates of the functions that the Torch call uses.
    """

    settings: dict[str, int]
    sizes: dict[str, str]
    lines: tuple[str, ...]
    tokens: str
    slots: str
    known: str
    call: str
    helpers: tuple[str, ...] = ()


def layout_of(op: RopeWrite, keys: TensorType) -> Layout:
    """Returns the layout of the cache that a node writes. `keys` is the type of the first cache tensor."""
    position = "position = tl.load(positions_ptr + token)"
    if op.paged:
        lines: tuple[str, ...] = (
            "text, token = row // EACH, row  # the tokens of a text follow each other",
            position,
            "outer, inner = tl.load(table_ptr + text * N + position // PAGE), position % PAGE",
        )
        return Layout(
            {"PAGE": number_of(keys.shape[1])},
            {"EACH": "cos.shape[0] // table.shape[0]", "N": "table.shape[1]"},
            lines,
            "1, t",
            "s, PAGE",
            "(r, n), s, t = table.shape, len(keys), len(cos) - len(cos) % max(len(table), 1)",
            "write_pages({cache}, {x}, positions, table)",
            ("torch/write_pages.py.jinja",),
        )
    lines = "text, token = row // T, row % T", position
    sizes, known = {"T": "cos.shape[0]"}, "rows, t, s = q.shape[0], cos.shape[0], keys.shape[1]"
    if op.ring is None:
        write = "{cache}.index_copy_(1, positions, {x})"
        return Layout({}, sizes, (*lines, "outer, inner = text, position"), "rows, t", "rows, s", known, write)
    first, window = op.ring
    inner = "position % WINDOW"
    if first:
        inner = "tl.where(position < FIRST, position, FIRST + (position - FIRST) % WINDOW)"
    return Layout(
        {**({"FIRST": first} if first else {}), "WINDOW": window},
        sizes,
        (*lines, f"outer, inner = text, {inner}"),
        "rows, t",
        "rows, s",
        f"rows, t, s = q.shape[0], 1, {first + window}  # attention reads the ring after this write",
        f"write_ring({{cache}}, {{x}}, positions, {first}, {window})",
        ("torch/write_ring.py.jinja",),
    )


class RopeWriteContext(NamedTuple):
    """The context of templates/triton/rope_write.py.jinja and templates/torch/rope_write.py.jinja.

    Attributes:
        op: the description of the function.
        heads: the number of query heads.
        groups: the number of key heads.
        channels: the number of channels of a query or key.
        values: the number of channels of a value.
        pairs: the number of rotated pairs of channels.
        step: the distance from the first channel of a pair to the first channel of the next pair.
        apart: the distance between the two channels of a pair.
        triton_dtype: the dtype of q, k and v in Triton.
        pdl: whether the kernel may begin before the preceding kernel ends (programmatic dependent launch).
        coded: whether rows are rounded to e4m3 codes.
        largest: the largest number of e4m3.
        settings: the line that assigns the constants of the layout. Empty if the layout has none.
        unspecialized: the run-time sizes that Triton does not specialize, as an argument of `jit`.
        kernel: the signature of the kernel.
        place: the lines that compute the address of a token's rows in the cache.
        key_lines: the lines that write the row of a rotated key.
        value_lines: the lines that write the row of a value. Empty if the row of a key contains the value.
        programs: the number of program instances per token.
        arguments: the arguments of the launch.
        custom_op: the decorator of the custom op, and its signature.
        fake: the signature of the custom op's fake implementation.
        known: the line that assigns the sizes of the inputs to names.
        copied: the line that copies inputs that are not contiguous.
        wanted: the input checks of the generated function.
        allocated: the lines that allocate the new outputs.
        created: the new outputs.
        called: the assignment that receives the results of the custom op.
        result: all outputs.
        helpers: the templates of functions that the Torch code calls.
        torch_rows: the Torch lines that compute the rows.
        torch_writes: the Torch lines that write the rows to the cache.
    """

    op: GeneratedFunction
    heads: int
    groups: int
    channels: int
    values: int
    pairs: int
    step: int
    apart: int
    triton_dtype: str
    pdl: bool
    coded: bool
    largest: float
    settings: str
    unspecialized: str
    kernel: str
    place: tuple[str, ...]
    key_lines: tuple[str, ...]
    value_lines: tuple[str, ...]
    programs: str
    arguments: str
    custom_op: tuple[str, str]
    fake: str
    known: str
    copied: str
    wanted: tuple[str, ...]
    allocated: tuple[str, ...]
    created: str
    called: str
    result: str
    helpers: tuple[str, ...]
    torch_rows: tuple[str, ...]
    torch_writes: tuple[str, ...]


def op_of(site: Site) -> RopeWrite:
    assert isinstance(site.node.op, RopeWrite)
    return site.node.op


def context_of(site: Site, made_by: str) -> RopeWriteContext:
    op, (q, k, v, cos, *_) = op_of(site), site.inputs
    inputs = dict(zip(op.names, site.inputs, strict=True))
    layout = layout_of(op, inputs["keys"])
    created = ["rotated", *(f"new_{name}" for name in op.new)]
    outputs = dict(zip(("rotated", *op.stored, *created[1:]), site.node.types, strict=True))
    heads, groups, channels, values = map(number_of, (q.shape[-2], k.shape[-2], q.width, v.width))
    pairs, step, apart = number_of(cos.width), 1 + op.neighbors, 1 if op.neighbors else number_of(cos.width)
    tensors = [*op.names, *created]
    function = generated_function(
        site,
        inputs,
        outputs,
        {name: f"[{', '.join(map(str, type.shape))}]" for name, type in (inputs | outputs).items()},
        f"{site.label}: rotary embedding of q and k, and the write of k and v to {_cache(op)}, {made_by}.",
        _formulas(op, pairs, step, apart),
        launched=tensors,
    )
    sizes = {**layout.sizes, **{f"{name.upper()}_STRIDE": f"{name}.stride(0)" for name in op.stored}}
    words = ["H", "G", "C", "V", "PAIRS", "STEP", "APART", *layout.settings]
    blocks = {"BLOCK_R": "PAIRS", "BLOCK_C": "max(1, C - 2 * PAIRS)", "BLOCK_V": "V"}
    constant = [f"{name}: tl.constexpr" for name in (*words, *blocks, "PDL")]
    filled = [f"triton.next_power_of_2({length})" for length in blocks.values()]
    parameters = [f"{name}: Tensor" for name in op.names]
    mutated = f"mutates_args=[{', '.join(map(json.dumps, op.stored))}]"
    results = "Tensor" if len(created) == 1 else f"tuple[{', '.join('Tensor' for _ in created)}]"
    return RopeWriteContext(
        op=function,
        heads=heads,
        groups=groups,
        channels=channels,
        values=values,
        pairs=pairs,
        step=step,
        apart=apart,
        triton_dtype=TRITON_DTYPES.get(q.dtype, ""),
        pdl=site.target.arch >= DEPENDENT_LAUNCH,
        coded=op.coded,
        largest=LARGEST,
        settings=constants(layout.settings) if layout.settings else "",
        unspecialized='(do_not_specialize=["N"])' if "N" in sizes else "",
        kernel=listed("def rope_write_kernel(", [*(f"{name}_ptr" for name in tensors), *sizes, *constant], "):"),
        place=layout.lines,
        key_lines=tuple(_key_lines(op)),
        value_lines=() if op.joined else tuple(_value_lines(op)),
        programs="H + G" if op.joined else "H + 2 * G",
        arguments=flowed(f"{', '.join(map(unbroken, (*tensors, *sizes.values(), *words, *filled, 'PDL')))},", " " * 8),
        custom_op=(
            listed("@torch.library.custom_op(", [f'f"{{NAMESPACE}}::{function.symbol}"', mutated], ")"),
            listed("def rotate_and_write(", parameters, f") -> {results}:"),
        ),
        fake=listed("def _(", parameters, f") -> {results}:"),
        known=layout.known,
        copied=_copied(["q", "k", "v", "cos", "sin", *op.names[5 + len(op.stored) :]]),
        wanted=tuple(_wanted(name, type, layout) for name, type in inputs.items()),
        allocated=tuple(_allocated(name, outputs[name], q) for name in created),
        created=", ".join(created),
        called=listed(f"{', '.join(created)} = rotate_and_write(", op.names, ")", 4).lstrip(),
        result=", ".join(outputs),
        helpers=(*(["torch/to_codes.py.jinja"] if op.coded else []), *layout.helpers),
        torch_rows=tuple(_torch_rows(op)),
        torch_writes=tuple(layout.call.format(cache=name, x=f"new_{name}") for name in op.stored),
    )


def _cache(op: RopeWrite) -> str:
    rows = "pages" if op.paged else "a ring" if op.ring is not None else "a cache"
    return f"{rows}{' of e4m3' * op.coded}"


def _formulas(op: RopeWrite, pairs: int, step: int, apart: int) -> Iterator[str]:
    first = f"{step} * i" if step > 1 else "i"
    yield f"a, b = x[{first}], x[{first} + {apart}], for i < {pairs}, in fp32"
    yield f"y[{first}], y[{first} + {apart}] = a * cos[i] + b * sin[i], b * cos[i] - a * sin[i]"
    if op.joined:
        yield "a row of the cache is v followed by the rotated k"
    if op.coded:
        yield f"scale = max(abs(row)) / {LARGEST:g} in bf16, or 1 for a row of zeros; codes = e4m3(row / scale)"
    if op.ring is not None:
        first_rows, window = op.ring
        row = f"{first_rows} + (position - {first_rows}) % {window}" if first_rows else f"position % {window}"
        before = f"position, if less than {first_rows}, else " if first_rows else ""
        yield f"row of a position: {before}{row}"


def _places(op: RopeWrite, name: str, width: str) -> Iterator[tuple[str, str]]:
    pitch = "" if width == "1" else f" * {width}"
    place = f"(inner * G + group){pitch}" if pitch else "inner * G + group"
    yield name, f"{name}_ptr + outer * {name.upper()}_STRIDE + {place}"
    if name in op.new:
        place = f"(row * G + group){pitch}" if pitch else "row * G + group"
        yield f"new_{name}", f"new_{name}_ptr + {place}"


def _key_lines(op: RopeWrite) -> Iterator[str]:
    width, behind = ("(V + C)", " + V") if op.joined else ("C", "")
    parts = ["first", "second", "others", *(["values"] if op.joined else [])]
    if op.joined:
        yield "c = tl.arange(0, BLOCK_V)"
        yield "values = tl.load(v_ptr + (row * G + group) * V + c, mask=c < V, other=0.0)"
    if op.coded:
        yield from _coded(op, "keys", parts)
    for name, place in _places(op, "keys", width):
        yield f"{name} = {place}"
        yield f"put({name}{behind}, first, second, others, {HEAD})"
        if op.joined:
            yield f"tl.store({name} + c, values, mask=c < V)"


def _value_lines(op: RopeWrite) -> Iterator[str]:
    if op.coded:
        yield from _coded(op, "values", ["values"])
    for _, place in _places(op, "values", "V"):
        yield f"tl.store({place} + c, values, mask=c < V)"


def _coded(op: RopeWrite, name: str, parts: Sequence[str]) -> Iterator[str]:
    most = f"magnitude({parts[0]})"
    for part in parts[1:]:
        most = f"tl.maximum({most}, magnitude({part}))"
    yield nested("scale", f"scale_of({most})", 8)
    yield from (f"{part} = to_e4m3({part}, scale)" for part in parts)
    for _, place in _places(op, f"{name}_scale", "1"):
        yield f"tl.store({place}, scale)"


def _torch_rows(op: RopeWrite) -> Iterator[str]:
    turned = "turned(k, cos, sin)"
    yield f"new_keys = {f'torch.cat((v, {turned}), -1)' if op.joined else turned}"
    if not op.joined:
        yield "new_values = v"
    for name in op.rows if op.coded else ():
        yield f"new_{name}, new_{name}_scale = to_codes(new_{name})"


def _copied(names: Sequence[str]) -> str:
    return f"{', '.join(names)} = (tensor.contiguous() for tensor in ({', '.join(names)}))"


def _wanted(name: str, type: TensorType, layout: Layout) -> str:
    heads = {"q": ("H", "C"), "k": ("G", "C"), "v": ("G", "V")}
    known = {"positions": "t,", "table": "r, n", **dict.fromkeys(("cos", "sin"), "t, PAIRS")}
    leading, dims = layout.slots, tuple(map(str, type.shape[2:]))
    if name in heads:
        leading, dims = layout.tokens, heads[name]
    shape = known.get(name) or ", ".join((leading, *dims))
    return f'("{name}", {name}, ({shape}), {DTYPES[type.dtype]}),'


def _allocated(name: str, type: TensorType, q: TensorType) -> str:
    if name == "rotated":
        return "rotated = q.new_empty(q.shape)"
    dtype = "" if type.dtype == q.dtype else f", dtype={DTYPES[type.dtype]}"
    return f"{name} = k.new_empty(*k.shape[:3], {type.width}{dtype})"


class RopeWriteTriton(Kernel):
    """Each program instance handles one head of one token."""

    def rejects(self, site: Site) -> str | None:
        op, (q, k, v, cos, sin, *_) = op_of(site), site.inputs
        caches = site.inputs[5 : 5 + len(op.rows)] if not op.coded else ()
        if q.dtype not in FLOATS or len({type.dtype for type in (q, k, v, *caches)}) > 1:
            return (
                f"reads and writes one dtype of {', '.join(FLOATS)}; q is {q}, and the cache is "
                f"{' and '.join(map(str, caches))}"
            )
        if op.coded and (q.dtype == "f32" or "fp8_mma" not in site.target.features):
            return f"rounds bf16 or f16 to e4m3, on sm89 or later, not {q.dtype} on {site.target.name}"
        if cos.dtype != "f32" or sin.dtype != "f32":
            return f"rotates by angles in f32, not {cos}"
        if (widest := max(number_of(q.width), number_of(v.width))) > WIDEST:
            return f"holds heads of up to {WIDEST} channels, not {widest}"
        return None

    def render(self, site: Site) -> Rendered:
        context = context_of(site, "in one kernel")
        return python_file(context.op, "triton/rope_write.py.jinja", context)


ROPE_WRITE_TRITON = RopeWriteTriton("rope_write_triton", "triton", computes=RopeWrite)


class RopeWriteTorch(Kernel):
    """Rotates in f32, and copies the result to the caches. On a GPU, this kernel accepts the nodes that the Triton
    kernel rejects. Every model can therefore decode."""

    RANK: ClassVar[int] = 9

    def rejects(self, site: Site) -> str | None:
        if ROPE_WRITE_TRITON.rejects(site) is not None:
            return None
        return unless_cpu(site, "would rotate and write in a dozen kernels")

    def render(self, site: Site) -> Rendered:
        context = context_of(site, "in plain Torch")
        return python_file(context.op, "torch/rope_write.py.jinja", context)


ROPE_WRITE_TORCH = RopeWriteTorch("rope_write_torch", "torch", computes=RopeWrite)
