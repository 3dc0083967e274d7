"""Parameters and buffers of a class, under the names in the spec."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specc.compiler.expr.python_lines import BODY, fitted
from specc.compiler.ir.graph import Named
from specc.compiler.ir.types import DTYPES, TensorType, spelled
from specc.compiler.render.function import Function, tuple_text

BUFFERS = "BUFFERS"


class ClassContext(NamedTuple):
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
        return tuple(text for line in self.init for text in fitted(line, BODY))


def parameter_lines(
    params: Sequence[Named],
    where: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
    table: str = BUFFERS,
    shapes: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    """Returns the lines that create parameters and buffers.

    Args:
        params: The paths and types of the parameters. Parameters whose type has `storage` become buffers.
        where: The conditions of parameters that only some instances of the class have, by path.
        modules: Paths of modules that other lines create. The returned lines create the parents of these modules.
        table: The table of buffers, by name or as an expression.
        shapes: The shapes that depend on the instance, as expressions, by the path of the parameter.

    Returns:
        The lines of the constructor.
    """
    where = where or {}
    holders: dict[str, list[tuple[str, str, str]]] = {}
    lines: list[str] = []
    stored = [path for path, type in params if type.storage]
    for path, type in params:
        holder, _, name = path.rpartition(".")
        otherwise = f" if {where[path]} else None" if path in where else ""
        shape = (shapes or {}).get(path, shape_text(type))
        shape = f"({shape})" if otherwise and path in (shapes or {}) else shape
        if holder and not type.storage:
            holders.setdefault(holder, []).append((name, shape, otherwise))
        elif not type.storage:
            value = f"nn.Parameter(torch.empty({', '.join(map(spelled, type.shape))})){otherwise}"
            lines.append(f"self.{name}{': Any' if otherwise else ''} = {value}")
    bare = [at for at in dict.fromkeys(path.rpartition(".")[0] for path in stored) if at and at not in holders]
    parents = [at.rpartition(".")[0] for at in (*holders, *bare)]
    empty = dict.fromkeys((*parents, *bare, *(at.rpartition(".")[0] for at in modules)))
    inside = {at for at in empty if any(at.startswith(f"{holder}.") for holder in holders)}
    outer = [at for at in empty if at and at not in holders and at not in inside]
    lines += [f"self.{at}{'' if '.' in at else ': Any'} = nn.Module()" for at in outer]
    parts = (holder.split(".") for holder in holders)
    above = dict.fromkeys(".".join(words[: i + 1]) for words in parts for i in range(len(words)))
    shared = {path.rpartition(".")[0] for path in stored}  # modules that also exist in instances without the parameters
    for holder, entries in ((holder, holders[holder]) for holder in above if holder in holders):
        conditions = {otherwise for _, _, otherwise in entries}
        together = conditions.pop() if len(conditions) == 1 and holder not in shared else ""
        texts = [f"{name}={shape}{otherwise * (not together)}" for name, shape, otherwise in entries]
        line = f"self.{holder} = weights({', '.join(texts)})"
        condition = together.removeprefix(" ").removesuffix(" else None")
        lines += [f"{condition}:", f"    {line}"] if together else [line]
    lines += [f"self.{at} = nn.Module()" for at in empty if at in inside and at not in holders]
    if stored:
        lines += [f"buffers = {table}"] if " " in table else []
        lines += [
            f"for name, (shape, dtype) in {'buffers' if ' ' in table else table}.items():",
            '    owner, _, leaf = name.rpartition(".")',
            "    self.get_submodule(owner).register_buffer(leaf, torch.empty(shape, dtype=dtype))",
        ]
    return tuple(lines)


def buffer_tables(params: Sequence[Named], table: str = BUFFERS) -> tuple[str, ...]:
    stored = [(path, type) for path, type in params if type.storage]
    rows = [f'    "{path}": ({shape_text(type)}, {DTYPES[type.dtype]}),' for path, type in stored]
    return ("\n".join((f"{table} = {{", *rows, "}")),) if rows else ()


def shape_text(type: TensorType) -> str:
    return tuple_text(list(map(spelled, type.shape)))
