"""Parameters and buffers of a class, under the names that the spec gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specc.compiler.expr.python_lines import fitted
from specc.compiler.ir.graph import Named, TensorType, spelled
from specc.compiler.render.body import BODY
from specc.compiler.render.function import Function

# What deployed models keep apart from their parameters: the numbers of products in int8.
STORED = {"i8": "torch.int8", "i32": "torch.int32", "f32": "torch.float32"}

BUFFERS = "BUFFERS"


@dataclass(frozen=True, slots=True)
class ClassContext:
    """An nn.Module: the arguments it is built with, the lines that do so, its methods."""

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
        """The lines that build it, none too long."""
        return tuple(text for line in self.init for text in fitted(line, BODY))


def parameter_lines(
    params: Sequence[Named], where: Mapping[str, str] | None = None, modules: Sequence[str] = (), table: str = BUFFERS
) -> tuple[str, ...]:
    """The lines that create parameters.

    Args:
        params: their paths and types. Those that are stored are buffers.
        where: for parameters that not every module of the class has, the condition under which it has them.
        modules: paths of modules that others create, of which the holders are made here.
        table: the name of the table of what is stored.
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
    """The definition of the table of what is stored apart from parameters; none where nothing is."""
    stored = [(path, type) for path, type in params if type.storage]
    rows = [f'    "{path}": ({_shape(type)}, {STORED[type.dtype]}),' for path, type in stored]
    return ("\n".join((f"{table} = {{", *rows, "}")),) if rows else ()


def _shape(type: TensorType) -> str:
    """A shape as a tuple."""
    return f"({', '.join(map(spelled, type.shape))}{',' if len(type.shape) == 1 else ''})"
