"""Joins several modules into one module. The result does not import the original modules."""

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from specc.runtime.submission.scopes import global_names, local_names

Symbol = tuple[str, str | None]  # a pair (module, name in the module); the name None stands for the module itself


class Part(Protocol):
    """A module to join with other modules.

    `imports` maps each imported name to its symbol. `bound` contains all other names that the module defines.
    `statements` returns the statements that the joined module needs.
    """

    @property
    def imports(self) -> Mapping[str, Symbol]: ...

    @property
    def bound(self) -> Mapping[str, object]: ...

    @property
    def dotted(self) -> Mapping[str, list[str]]: ...

    def statements(self) -> list[ast.stmt]: ...


def flattened(parts: Mapping[str, Part], resolved: Callable[[Symbol], Symbol]) -> tuple[ast.Module, dict[Symbol, str]]:
    """Joins modules.

    Args:
        parts: the modules, by name.
        resolved: a function that maps a symbol to the pair (module that defines the symbol, name in this module).

    Returns:
        The joined module, and the name of each symbol in the joined module.
    """
    joiner = _Joiner(parts, resolved)
    body = [joiner.joined(name, statement) for name in sorted(parts) for statement in parts[name].statements()]
    return ast.Module([*joiner.import_lines(), *_ordered(body)], []), joiner.names


def _ordered(body: list[ast.stmt]) -> list[ast.stmt]:
    """Sorts statements. Each statement follows the definitions of the names that it evaluates.

    A statement may call functions. If possible, it therefore also follows the definitions that these functions need.
    """
    binders: dict[str, list[int]] = {}
    for place, statement in enumerate(body):
        bound = [statement.name] if isinstance(statement, ast.FunctionDef | ast.ClassDef) else []
        bound += [node.id for node in global_names(statement) if isinstance(node.ctx, ast.Store)]
        for name in bound:
            binders.setdefault(name, []).append(place)
    at_once: list[list[int]] = []
    needed: list[list[int]] = []
    for statement in body:
        functions = (node for node in ast.walk(statement) if isinstance(node, ast.FunctionDef | ast.Lambda))
        bodies = (node.body if isinstance(node.body, list) else [node.body] for node in functions)
        late = {id(node) for nodes in bodies for each in nodes for node in ast.walk(each)}
        names = [node for node in global_names(statement) if isinstance(node.ctx, ast.Load)]
        needed.append([place for node in names for place in binders.get(node.id, ())])
        at_once.append([place for node in names if id(node) not in late for place in binders.get(node.id, ())])
    before: list[set[int]] = []  # for each statement, the statements that must precede it
    for place in range(len(body)):
        before.append(reached := set())
        queue = [*at_once[place]]
        while queue:
            if (other := queue.pop()) not in reached:
                reached.add(other)
                queue += at_once[other]
    started: set[int] = set()
    order: dict[int, None] = {}

    def add(place: int) -> None:
        started.add(place)
        for other in (*at_once[place], *needed[place]):
            if other not in started and not before[other] & (started - order.keys()):
                add(other)
        order[place] = None

    for place in range(len(body)):
        if place not in started:
            add(place)
    return [body[place] for place in order]


class _Joiner:
    def __init__(self, parts: Mapping[str, Part], resolved: Callable[[Symbol], Symbol]) -> None:
        self._parts, self._resolved = parts, resolved
        self.names: dict[Symbol, str] = {}
        self._local = {name for part in parts.values() for each in part.statements() for name in local_names(each)}
        self._dotted: set[str] = set()  # submodules outside the package, which statements `import a.b` load

    def joined(self, owner: str, statement: ast.stmt) -> ast.stmt:
        """Returns a statement of the module `owner`, with all names replaced by the names in the joined module."""
        late = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in ast.walk(statement)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if self._is_inside((str(node.module), alias.name))
        }  # imports inside functions, which a single module does not need
        imports = {**self._parts[owner].imports, **late}
        modules: dict[int, str] = {}
        for node in list(global_names(statement, late)):
            if node.id in imports:
                symbol = self._resolved(imports[node.id]) if self._is_inside(imports[node.id]) else imports[node.id]
                if symbol[1] is None and symbol[0] in self._parts:
                    modules[id(node)] = symbol[0]
                else:
                    self._dotted |= {*self._parts[owner].dotted.get(node.id, ())}
                    node.id = self.name(symbol)
            elif node.id in self._parts[owner].bound:
                node.id = self.name(self._resolved((owner, node.id)))
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            statement.name = self.name((owner, statement.name))
        return _Lookups(modules, self.name, late).visit(statement)  # type: ignore[no-any-return]

    def import_lines(self) -> Iterator[ast.stmt]:
        yield from (ast.Import([ast.alias(name)]) for name in sorted(self._dotted))
        lines: dict[str, list[ast.alias]] = {}
        for (source, symbol), name in sorted(self.names.items(), key=lambda item: (item[0][0], item[0][1] or "")):
            if source not in self._parts:
                alias = ast.alias(symbol or source, None if name == (symbol or source) else name)
                lines.setdefault(source if symbol else "", []).append(alias)
        yield from (
            ast.ImportFrom(source, names, 0) if source else ast.Import(names) for source, names in lines.items()
        )

    def name(self, symbol: Symbol) -> str:
        if symbol not in self.names:
            wanted = symbol[1] or symbol[0].replace(".", "_")
            taken = {*self.names.values(), *self._local, *(name.partition(".")[0] for name in self._dotted)}
            free = (f"{wanted}_{i}" if i else wanted for i in range(len(taken) + 1))
            self.names[symbol] = next(name for name in free if name not in taken)
        return self.names[symbol]

    def _is_inside(self, symbol: Symbol) -> bool:
        return self._resolved(symbol)[0] in self._parts


class _Lookups(ast.NodeTransformer):
    """Replaces `module.name` by the name in the joined module, and removes imports inside functions.

    The transformation affects only modules of the joined package.
    """

    def __init__(self, modules: Mapping[int, str], name: Callable[[Symbol], str], late: Mapping[str, Symbol]) -> None:
        self._modules, self._name, self._late = modules, name, late

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if id(node.value) in self._modules:
            return ast.Name(self._name((self._modules[id(node.value)], node.attr)), node.ctx)
        self.generic_visit(node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | None:
        node.names = [each for each in node.names if (each.asname or each.name) not in self._late]
        return node if node.names else None
