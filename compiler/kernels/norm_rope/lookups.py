"""Rows of several tables in one Triton kernel, for the new tokens of a decoding step."""

from typing import NamedTuple

from specc.compiler.ir.types import DTYPES, TensorType
from specc.compiler.kernels.epilogue import FLOATS
from specc.compiler.kernels.gemm.rows import DEPENDENT_LAUNCH
from specc.compiler.kernels.generated import GeneratedFunction, generated_function, number_of, python_file
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.kernels.lines import flowed, listed, unbroken
from specc.compiler.ops.decoding.lookups import Lookups

WIDEST = 16_384  # elements of a row; one program instance copies a row


class LookupsContext(NamedTuple):
    """The context of templates/triton/lookups.py.jinja.

    Attributes:
        op: The description of the function.
        pdl: Whether the kernel may begin before the preceding kernel ends (programmatic dependent launch).
        ropes: Whether there are tables of angles.
        kernel: The signature of the kernel.
        copies: The lines that copy one row, or one row of cosines and one of sines.
        angles: The lines of the launch that define the tables of angles.
        most: The largest number of rows that the kernel copies from one table, as an expression.
        grid: The number of program instances, as an expression.
        arguments: The arguments of the launch.
        first: The name of the first input.
        wanted: The input checks of the generated function.
        copied: The lines that copy indices that are not contiguous.
        allocated: The lines that allocate the outputs.
        result: The returned expression.
    """

    op: GeneratedFunction
    pdl: bool
    ropes: bool
    kernel: str
    copies: tuple[str, ...]
    angles: tuple[str, ...]
    most: str
    grid: str
    arguments: str
    first: str
    wanted: tuple[str, ...]
    copied: tuple[str, ...]
    allocated: tuple[str, ...]
    result: str


class LookupsTriton(Kernel):
    """Each program instance copies one row of one table, or one row of cosines and one of sines."""

    def rejects(self, site: Site) -> str | None:
        op = op_of(site)
        for index in (*site.inputs[: 2 * op.tables : 2], *site.inputs[2 * op.tables :]):
            if index.dtype != "i64":
                return f"reads indices i64, not {index}"
        for table in site.inputs[1 : 2 * op.tables : 2]:
            if table.dtype not in FLOATS or not all(isinstance(dim, int) for dim in table.shape):
                return f"reads tables of {', '.join(FLOATS)} of a known size, not {table}"
        if (widest := max(number_of(type.width) for type in site.node.types)) > WIDEST:
            return f"copies rows of up to {WIDEST} elements, not {widest}"
        return None

    def render(self, site: Site) -> Rendered:
        context = context_of(site)
        return python_file(context.op, "triton/lookups.py.jinja", context)


LOOKUPS_TRITON = LookupsTriton("lookups_triton", "triton", frozenset({"gpu"}), Lookups)


def op_of(site: Site) -> Lookups:
    assert isinstance(site.node.op, Lookups)
    return site.node.op


def context_of(site: Site) -> LookupsContext:
    op, types = op_of(site), iter(site.inputs)
    embeddings, ropes = _counted(op.tables), _counted(len(op.ropes))
    inputs: dict[str, TensorType] = {}
    for i in embeddings:
        inputs |= {f"ids{i}": next(types), f"table{i}": next(types)}
    inputs |= {f"positions{i}": next(types) for i in ropes}
    names = [*(f"rows{i}" for i in embeddings), *(f"{word}{i}" for i in ropes for word in ("cos", "sin"))]
    outputs = dict(zip(names, site.node.types, strict=True))
    shapes = {name: f"[{', '.join(map(str, type.shape))}]" for name, type in (inputs | outputs).items()}
    indices = [name for name in inputs if not name.startswith("table")]
    function = generated_function(
        site,
        inputs,
        outputs,
        shapes,
        f"{site.label}: rows of {op.tables + 2 * len(ropes)} tables in one kernel.",
        [
            *(f"rows{i} = table{i}[ids{i}]" for i in embeddings),
            *(
                f"cos{i}, sin{i} = those of positions{i} * {base} ** (-2 j / {dims}), j < {dims // 2}"
                for i, (dims, base, _) in zip(ropes, op.ropes, strict=True)
            ),
        ],
    )
    tensors = [*inputs, *(f"{word}{i}_table" for i in ropes for word in ("cos", "sin")), *outputs]
    counts = [f"{name}.numel()" for name in indices]
    sizes = [f"{name.upper()}_COUNT" for name in indices]
    copies = [[_copy(f"rows{i}", f"table{i}", f"ids{i}", inputs[f"table{i}"])] for i in embeddings]
    for i, (dims, _, context) in zip(ropes, op.ropes, strict=True):
        type = TensorType((context, dims // 2), "f32")
        copies.append([_copy(f"{word}{i}", f"{word}{i}_table", f"positions{i}", type) for word in ("cos", "sin")])
    most = f"max({', '.join(counts)})" if len(counts) > 1 else counts[0]
    return LookupsContext(
        op=function,
        pdl=site.target.arch >= DEPENDENT_LAUNCH,
        ropes=bool(ropes),
        kernel=listed(
            f"def {function.function}_kernel(",
            [*(f"{name}_ptr" for name in tensors), *sizes, "PDL: tl.constexpr"],
            "):",
        ),
        copies=tuple(
            line
            for i, lines in enumerate(copies)
            for line in (f"if tl.program_id(1) == {i}:", *(f"    {line}" for line in lines))
        ),
        angles=tuple(
            f"cos{i}_table, sin{i}_table = angles({dims}, {base}, {context}, positions{i}.device)"
            for i, (dims, base, context) in zip(ropes, op.ropes, strict=True)
        ),
        most=most,
        grid=f"({most}, {len(copies)})",
        arguments=flowed(f"{', '.join(map(unbroken, (*tensors, *counts, 'PDL')))},", " " * 8),
        first=indices[0],
        wanted=tuple(_wanted(name, type) for name, type in inputs.items()),
        copied=tuple(f"{name} = {name}.contiguous()" for name in indices),
        allocated=(
            *(f"rows{i} = table{i}.new_empty(*ids{i}.shape, {inputs[f'table{i}'].width})" for i in embeddings),
            *(
                f"{word}{i} = positions{i}.new_empty(len(positions{i}), {dims // 2}, dtype=torch.float32)"
                for i, (dims, *_) in zip(ropes, op.ropes, strict=True)
                for word in ("cos", "sin")
            ),
        ),
        result=", ".join(outputs),
    )


def _counted(count: int) -> list[str]:
    """Returns suffixes that distinguish `count` names: 0, 1, ..., or an empty suffix if there is only one name."""
    return [str(i) for i in range(count)] if count > 1 else [""] * count


def _copy(to: str, table: str, index: str, type: TensorType) -> str:
    rows, width = map(number_of, type.shape)
    block = 1 << (width - 1).bit_length()
    return f"copy_row({to}_ptr, {table}_ptr, {index}_ptr, {index.upper()}_COUNT, {rows}, {width}, {block})"


def _wanted(name: str, type: TensorType) -> str:
    shape = tuple(type.shape) if name.startswith("table") else f"{name}.shape"
    return f'("{name}", {name}, {shape}, {DTYPES[type.dtype]}),'
