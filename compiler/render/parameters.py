"""Parameters and buffers of a class, under the names of the spec."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specc.compiler.expr.python_lines import fitted
from specc.compiler.ir.graph import Named, TensorType, spelled
from specc.compiler.render.body import BODY
from specc.compiler.render.function import Function

# The dtypes of buffers, in which deployed models store the operands of int8 products.
STORED = {"i8": "torch.int8", "i32": "torch.int32", "f32": "torch.float32"}

BUFFERS = "BUFFERS"


@dataclass(frozen=True, slots=True)
class ClassContext:
    """An nn.Module as text: its constructor arguments, the lines of its constructor, and its methods."""

    name: str
    doc: tuple[str, ...]
    arguments: tuple[str, ...]
    init: tuple[str, ...]
    methods: tuple[Function, ...]
    aliases: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()

    @property
    def code(self) -> tuple[str, ...]:
        """The lines of the constructor, each within the line length."""
        return tuple(text for line in self.init for text in fitted(line, BODY))


def parameter_lines(
    params: Sequence[Named], where: Mapping[str, str] | None = None, modules: Sequence[str] = (), table: str = BUFFERS
) -> tuple[str, ...]:
    """Returns the lines that create parameters and buffers.

    Args:
        params: the paths and types of the parameters. Those whose type has `storage` become buffers.
        where: the condition under which an instance of the class has a parameter, for those that not all instances
            have.
        modules: paths of modules that are created elsewhere; the lines create their parent modules.
        table: the name of the table of buffers.

    Returns:
        The lines of the constructor.
    """
    where = where or {}
    holders: dict[str, list[tuple[str, str, str]]] = {}
    lines: list[str] = []
    stored = [entry for entry in params if entry[1].storage]
    for path, type in params:
        if type.storage:
            continue
        holder, _, name = path.rpartition(".")
        shape = _shape(type)
        if holder:
            holders.setdefault(holder, []).append((name, shape, where.get(path, "")))
        else:
            made = f"nn.Parameter(torch.empty({shape[1:-1].rstrip(',')}))"
            lines.append(f"self.{name} = {made}" + (f" if {where[path]} else None" if path in where else ""))
    owners = dict.fromkeys(path.rpartition(".")[0] for path, _ in stored)
    bare = [holder for holder in owners if holder and holder not in holders]
    parents = [parent for held in (*holders, *bare) if (parent := held.rpartition(".")[0])]
    empty = dict.fromkeys((*parents, *bare, *(parent for at in modules if (parent := at.rpartition(".")[0]))))
    lines += [f"self.{parent} = nn.Module()" for parent in empty if parent not in holders]
    for holder, entries in holders.items():
        conditions = {condition for _, _, condition in entries}
        together = conditions.pop() if len(conditions) == 1 else None
        texts = [
            f"{name}={shape}" + (f" if {condition} else None" if condition and together is None else "")
            for name, shape, condition in entries
        ]
        made = f"self.{holder} = weights({', '.join(texts)})"
        lines += [f"if {together}:", f"    {made}"] if together else [made]
    if stored:
        lines += [
            f"for name, (shape, dtype) in {table}.items():",
            '    owner, _, leaf = name.rpartition(".")',
            "    self.get_submodule(owner).register_buffer(leaf, torch.empty(shape, dtype=dtype))",
        ]
    return tuple(lines)


def buffer_tables(params: Sequence[Named], table: str = BUFFERS) -> tuple[str, ...]:
    """Returns the definition of the table of buffers; empty if there are none."""
    stored = [(path, type) for path, type in params if type.storage]
    rows = [f'    "{path}": ({_shape(type)}, {STORED[type.dtype]}),' for path, type in stored]
    return ("\n".join((f"{table} = {{", *rows, "}")),) if rows else ()


def _shape(type: TensorType) -> str:
    """Returns a shape as the text of a tuple."""
    return f"({', '.join(map(spelled, type.shape))}{',' if len(type.shape) == 1 else ''})"
