"""Tree shaking: extracts the statements of a package that an entry function needs, as a new package.

Modules are parsed, never executed. The search starts at the entry function. From each name, it continues with the
statements that define the name. From each import, it continues with the statements of the imported module. All visited
statements are included. A method of an included class is included if its name occurs in included code, as an attribute
or a string. Special methods are always included. Docstrings and annotations are removed. Local variables and parameters
get short names (see scopes.py).
"""

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard, cast

from specc.runtime.submission.flatten import Symbol, flattened
from specc.runtime.submission.scopes import shorten


class ShakeError(Exception):
    """Raised if the sources contain a construct that is not supported."""


@dataclass
class _Module:
    """A parsed module without docstrings and annotations.

    `imports` maps imported names to their symbols. `bound` maps each other name to the indices of the statements that
    define the name. `needed` contains the indices of the statements to include. `used` contains the imported names that
    occur in the included statements.
    """

    body: list[ast.stmt]
    imports: dict[str, Symbol] = field(default_factory=dict)
    bound: dict[str, list[int]] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)
    used: dict[str, Symbol] = field(default_factory=dict)
    dotted: dict[str, list[str]] = field(default_factory=dict)  # maps `a` to the modules of all `import a.b` statements

    def statements(self) -> list[ast.stmt]:
        return [self.body[place] for place in sorted(self.needed)]


class Shaker:
    """Collects the statements of a package that entry functions need.

    Args:
        root: the name of the package.
        sources: the source texts of the modules, by module name.
        replaced: the replacements of symbols. Symbols are pairs (module, name). A pair (module, None) stands for
            all names of a module outside the package.
        joined: the name of the joined module.
    """

    def __init__(
        self, root: str, sources: Mapping[str, str], replaced: Mapping[Symbol, Symbol], joined: str = "parts.main"
    ) -> None:
        self._root, self._sources, self._replaced, self._joined = root, sources, replaced, joined
        self._outside: dict[str, ast.Module] = {}
        self._modules: dict[str, _Module] = {}
        self._queue: list[tuple[str, ast.stmt]] = []
        self._named: set[str] = set()  # the attributes and strings in the included code
        # The methods whose names have not occurred in included code yet, by name
        self._methods: dict[str, list[tuple[str, ast.stmt]]] = {}
        self._keywords: set[str] = set()  # the names of keyword arguments in calls of the included code

    def reach(self, module: str, name: str) -> None:
        """Includes the statements that define `name` in `module`, and all statements on which they depend."""
        self._reach(self._resolved((module, name)))
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            self._follow(*self._queue.pop())

    def include(self, file: str, text: str) -> None:
        """Includes a module from outside the package, without docstrings, and every symbol that it imports."""
        tree = ast.parse(text)
        _Strip(annotations=False).visit(tree)
        for node in ast.walk(tree):
            self._name(node)
            for target in _targets_of(node):
                if self.inside(target[0]):
                    self.reach(*target)
        self._drain()
        self._outside[file] = tree

    def texts(self, *public: Symbol) -> dict[str, str]:
        """Returns the sources of the new package by file name: the joined module, and modules from outside the package.

        Args:
            public: functions of the joined module. Their names do not change.
        """
        unnamed = {id(method) for methods in self._methods.values() for _, method in methods}
        for module in self._modules.values():
            module.body = [_without(statement, unnamed) for statement in module.body]
        opaque = [
            (name, each.name)
            for name, module in self._modules.items()
            for each in module.statements()
            if isinstance(each, ast.ClassDef) and self._is_called_from_outside(name, each)
        ]
        tree, names = flattened(self._modules, self._resolved)
        entries = [str(name) for _, name in public]
        short = shorten(tree, self._keywords, [names[symbol] for symbol in opaque], entries)
        names = {symbol: short.get(name, name) for symbol, name in names.items()}
        texts = {f"{self._joined.rpartition('.')[2]}.py": _text(ast.fix_missing_locations(tree))}
        for file, outside in self._outside.items():
            texts[file] = _text(ast.fix_missing_locations(_Imports(self, names, self._joined).visit(outside)))
        return texts

    def resolved(self, module: str, name: str) -> Symbol:
        """Returns the symbol that `from module import name` imports.

        A symbol is a pair: the module that defines the symbol, and its name in this module.
        """
        return self._resolved((module, name))

    def inside(self, module: str) -> bool:
        return module.partition(".")[0] == self._root or (module, None) in self._replaced

    def _resolved(self, symbol: Symbol) -> Symbol:
        module, name = symbol
        if symbol in self._replaced:
            return self._resolved(self._replaced[symbol])
        if (module, None) in self._replaced:
            return self._resolved((self._replaced[module, None][0], name))
        if name is None or not self.inside(module):
            return symbol
        submodule = f"{module}.{name}"
        origin = self._module(module) if module in self._sources or submodule not in self._sources else _Module([])
        if name in origin.imports:
            return self._resolved(origin.imports[name])
        if name in origin.bound:
            return symbol
        if submodule in self._sources:  # the name is a submodule, unless the package itself binds the name
            return submodule, None
        raise ShakeError(f"{module} has no {name}")

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            if name not in self._sources:
                raise ShakeError(f"there is no module {name}")
            tree = ast.parse(self._sources[name])
            is_package = any(other.startswith(f"{name}.") for other in self._sources)
            _absolute(tree, name if is_package else name.rpartition(".")[0])
            _Strip(annotations=True).visit(tree)
            module = self._modules[name] = _Module(tree.body)
            for place, statement in enumerate(tree.body):
                if isinstance(statement, ast.ImportFrom):
                    for alias in statement.names:
                        module.imports[alias.asname or alias.name] = (str(statement.module), alias.name)
                elif isinstance(statement, ast.Import):
                    for alias in statement.names:
                        if alias.asname is None and "." in alias.name:
                            first = alias.name.partition(".")[0]
                            module.imports[first] = (first, None)
                            module.dotted.setdefault(first, []).append(alias.name)
                        else:
                            module.imports[alias.asname or alias.name] = (alias.name, None)
                else:
                    for bound in _bindings(statement):
                        module.bound.setdefault(bound, []).append(place)
        return self._modules[name]

    def _reach(self, symbol: Symbol) -> None:
        name, bound = symbol
        if name not in self._sources:
            return
        module = self._module(name)
        places = module.bound.get(bound, []) if bound is not None else range(len(module.body))
        effects = [i for i, statement in enumerate(module.body) if isinstance(statement, ast.Expr | ast.For | ast.With)]
        for place in [*places, *effects]:
            if place not in module.needed and not isinstance(module.body[place], ast.Import | ast.ImportFrom):
                module.needed.add(place)
                statement = module.body[place]
                if isinstance(statement, ast.ClassDef) and not self._is_called_from_outside(name, statement):
                    methods = [each for each in statement.body if _is_method(each)]
                    for method in methods:
                        self._offer(name, method)
                    statement = _without(statement, {id(method) for method in methods})
                self._queue.append((name, statement))

    def _offer(self, owner: str, method: ast.FunctionDef) -> None:
        if method.name in self._named:
            self._queue.append((owner, method))
        else:
            self._methods.setdefault(method.name, []).append((owner, method))

    def _name(self, node: ast.AST) -> None:
        if isinstance(node, ast.keyword) and node.arg is not None:
            self._keywords.add(node.arg)
        name = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
        if isinstance(name, str) and name not in self._named:
            self._named.add(name)
            self._queue += self._methods.pop(name, [])

    def _is_called_from_outside(self, owner: str, statement: ast.ClassDef) -> bool:
        """Returns whether a base class is outside the package, such as `torch.nn.Module`. Such a base class may call
        any method.
        """
        module = self._module(owner)
        for base in statement.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            if not isinstance(expression, ast.Name):
                return True
            symbol: Symbol = (owner, expression.id)
            if expression.id in module.imports:
                symbol = self._resolved(module.imports[expression.id])
            source, name = symbol
            if source not in self._sources:
                if source not in ("typing", "abc", "enum"):
                    return True
            elif name in self._module(source).bound:
                (place,) = self._module(source).bound[name]
                definition = self._module(source).body[place]
                if not isinstance(definition, ast.ClassDef) or self._is_called_from_outside(source, definition):
                    return True
        return False

    def _follow(self, owner: str, statement: ast.stmt) -> None:
        module = self._modules[owner]
        attributes = {
            id(node.value): node.attr
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        for node in ast.walk(statement):
            self._name(node)
            for target in _targets_of(node):
                if self.inside(target[0]):
                    self._reach(self._resolved(target))
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
                continue
            if node.id in module.imports:
                symbol = self._resolved(module.imports[node.id])
                module.used[node.id] = symbol
                if symbol[1] is not None:
                    self._reach(symbol)
                elif symbol[0] in self._sources:
                    self._through(symbol[0], attributes.get(id(node)))
            elif node.id in module.bound:
                symbol = self._resolved((owner, node.id))
                if symbol != (owner, node.id):
                    module.used[node.id] = symbol
                self._reach(symbol)

    def _through(self, module: str, attribute: str | None) -> None:
        if attribute is None or attribute not in self._module(module).bound:
            raise ShakeError(f"{module} may only be used to look up a name that it defines")
        self._reach((module, attribute))


def _is_method(statement: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(statement, ast.FunctionDef) and not (statement.name.startswith("__"))


def _without(statement: ast.stmt, left_out: Collection[int]) -> ast.stmt:
    if not isinstance(statement, ast.ClassDef):
        return statement
    body = [each for each in statement.body if id(each) not in left_out]
    fields = {name: value for name, value in ast.iter_fields(statement) if name != "body"}
    return ast.ClassDef(**fields, body=body or [ast.Pass()])


def _absolute(tree: ast.AST, package: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parents = package.split(".")
            node.module = ".".join((*parents[: len(parents) - node.level + 1], *filter(None, (node.module,))))
            node.level = 0


def _text(tree: ast.AST) -> str:
    return re.sub("(?m)^( {4})+", lambda spaces: " " * (len(spaces[0]) // 4), ast.unparse(tree)) + "\n"


def _targets_of(node: ast.AST) -> list[tuple[str, str]]:
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [(node.module, alias.name) for alias in node.names]
    return []


def _bindings(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    bound = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if isinstance(statement, ast.If | ast.Try):
        bound |= {n.name for n in ast.walk(statement) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return bound


class _Imports(ast.NodeTransformer):
    """Replaces imports of the old package by imports of the joined module."""

    def __init__(self, shaker: Shaker, names: Mapping[Symbol, str], joined: str) -> None:
        self._shaker, self._names, self._joined = shaker, names, joined

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        if node.level or node.module is None or not self._shaker.inside(node.module):
            return node
        short = [self._names[self._shaker.resolved(node.module, alias.name)] for alias in node.names]
        wanted = [alias.asname or alias.name for alias in node.names]
        aliases = [ast.alias(s, None if s == w else w) for s, w in zip(short, wanted, strict=True)]
        return ast.ImportFrom(self._joined, aliases, 0)


class _Strip(ast.NodeTransformer):
    """Removes docstrings. With `annotations`, also removes annotations, casts and assertions.

    Annotations in a class body become `int`, because dataclasses find their fields by annotations. The ranges in
    `Field(...)` and the marker of keyword-only fields are kept.
    """

    def __init__(self, annotations: bool) -> None:
        self._annotations = annotations
        self._in_class = False

    def visit_Module(self, node: ast.Module) -> ast.Module:
        return cast(ast.Module, self._bare(node))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        before, self._in_class = self._in_class, True
        self._bare(node)
        self._in_class = before
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        before, self._in_class = self._in_class, False
        self._bare(node)
        if self._annotations:
            node.returns = None
        self._in_class = before
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        if self._annotations:
            node.annotation = None
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        cast = isinstance(node.func, ast.Name) and node.func.id == "cast" and len(node.args) == 2
        return node.args[1] if cast and self._annotations else node

    def visit_Assert(self, node: ast.Assert) -> ast.Assert | None:
        return None if self._annotations else node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return [cast(ast.stmt, self.visit(statement)) for statement in node.orelse]
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | None:
        if not self._annotations:
            return node
        text = ast.unparse(node.annotation)
        if self._in_class and "ClassVar" not in text:
            if not re.search(r"\bKW_ONLY$|Field\((?:ge|gt|le|lt)=", text):
                node.annotation = ast.Name("int", ast.Load())
            return node
        return ast.Assign([node.target], node.value) if node.value is not None else None

    def _bare(self, node: ast.Module | ast.ClassDef | ast.FunctionDef) -> ast.AST:
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:]
        self.generic_visit(node)
        if not node.body and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]
        return node
