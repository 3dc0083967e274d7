"""Variables in a Python syntax tree: finds variables of a module, and shortens names.

Names of attributes and modules do not change. A parameter that any call passes by keyword does not change either.
"""

import ast
import builtins
import keyword
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, product
from string import ascii_lowercase, ascii_uppercase

# If a function calls one of these functions, its variables are not renamed
INTROSPECTION = {"locals", "vars", "eval", "exec"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def global_names(statement: ast.AST, aliases: Collection[str] = ()) -> Iterator[ast.Name]:
    """Yields the nodes of a statement that refer to a variable of the module or to a built-in.

    Args:
        statement: the statement.
        aliases: names that imports inside functions define. These names count as variables of the module.
    """
    yield from _global_names(statement, frozenset(), frozenset(), aliases)


def _global_names(
    node: ast.AST, local: frozenset[str], body: frozenset[str], aliases: Collection[str]
) -> Iterator[ast.Name]:
    if isinstance(node, ast.Name):
        if node.id not in local and node.id not in body:
            yield node
        return
    outside: list[ast.AST] = []  # parts of the node that are evaluated in the scope outside `node`
    inside: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, _Function | ast.Lambda):
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        arguments = node.args
        outside = [*decorators, *arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]
        outside += [each.annotation for each in ast.walk(arguments) if isinstance(each, ast.arg) and each.annotation]
        outside += [node.returns] if isinstance(node, _Function) and node.returns else []
        inside = [node.body] if isinstance(node, ast.Lambda) else node.body
        inner, bound = local | _locals(inside, aliases) | {each.arg for each in _arguments(node)}, frozenset[str]()
    elif isinstance(node, _Comprehension):
        outside = [node.generators[0].iter]
        inside = [each for each in ast.iter_child_nodes(node) if each is not node.generators[0]]
        inside += [node.generators[0].target, *node.generators[0].ifs]
        inner, bound = local | {name for each in node.generators for name in _stored(each.target)}, frozenset[str]()
    elif isinstance(node, ast.ClassDef):
        outside = [*node.decorator_list, *node.bases, *node.keywords]
        inside, inner, bound = node.body, local, _locals(node.body, aliases)
    else:
        inner, bound = local, body
    for each in outside:
        yield from _global_names(each, local, body, aliases)
    for each in inside:
        yield from _global_names(each, inner, bound, aliases)


def local_names(statement: ast.AST) -> set[str]:
    outer = {id(node) for node in global_names(statement)}
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and id(node) not in outer}
    return names | {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}


def _locals(body: Iterable[ast.AST], aliases: Collection[str]) -> frozenset[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, _Function | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names.add(node.rest)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names} - {*aliases}
        inner = ast.iter_child_nodes(node)
        if isinstance(node, _Comprehension):  # does not bind names outside, except by `:=`
            inner = (each for each in ast.walk(node) if isinstance(each, ast.NamedExpr))
        names |= _locals(inner, aliases)
    return frozenset(names)


def _arguments(function: _Function | ast.Lambda) -> list[ast.arg]:
    return [node for node in ast.iter_child_nodes(function.args) if isinstance(node, ast.arg)]


def _stored(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def shorten(
    tree: ast.Module, keywords: Collection[str], opaque: Collection[str], public: Collection[str]
) -> dict[str, str]:
    """Renames variables of a module, and variables and parameters of its functions, in place.

    A function and the functions inside it share one mapping of names. New names of module variables begin with
    capitals, so that they differ from new names inside functions.

    Args:
        tree: the module.
        keywords: the names of the keyword arguments of all calls.
        opaque: the classes whose methods other packages may call with any keyword.
        public: the variables that must not be renamed.

    Returns:
        The new names of the module's variables, by old name.
    """
    nodes = [node for statement in tree.body for node in global_names(statement)]
    definitions = [each for each in tree.body if isinstance(each, _Function | ast.ClassDef)]
    imported = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    aliases = [each for statement in imported for each in statement.names if each.asname or "." not in each.name]
    bound = {node.id for node in nodes if isinstance(node.ctx, ast.Store)} | {each.name for each in definitions}
    bound |= {each.asname or each.name for each in aliases}
    taken = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - bound
    taken |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)} | {*keywords}
    counts = Counter(node.id for node in nodes)
    rare = {
        each.name for each in aliases if each.asname is None and counts[each.name] < 2
    }  # an `as` would take more bytes
    order = sorted(bound - rare - {*public}, key=lambda name: (-counts[name], name))
    short = dict(zip(order, (name for name in _capitals() if name not in taken), strict=False))
    for node in nodes:
        node.id = short.get(node.id, node.id)
    classes = {short.get(name, name) for name in opaque}
    for definition in definitions:
        definition.name = short.get(definition.name, definition.name)
    for alias in aliases:
        bound_as = alias.asname or alias.name
        alias.asname = short.get(bound_as, bound_as)
        if alias.asname == alias.name:
            alias.asname = None
    fixed = {*vars(builtins), *keywords, *short.values(), *rare, *public}
    for statement in definitions:
        parameters = statement.name not in classes
        for each in statement.body if isinstance(statement, ast.ClassDef) else [statement]:
            if isinstance(each, _Function):
                _shorten_function(each, fixed, parameters)
    return short


def _shorten_function(function: _Function, fixed: Collection[str], parameters: bool) -> None:
    nodes = list(ast.walk(function))
    # These statements define names by special rules.
    if any(isinstance(node, ast.ClassDef | ast.Match) for node in nodes):
        return
    names = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))
    if INTROSPECTION & names.keys():
        return
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    arguments = [node for node in nodes if isinstance(node, ast.arg)]
    reserved = {*fixed, "self", "cls"}
    (bound if parameters else reserved).update(argument.arg for argument in arguments)
    for node in nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            reserved.update(node.names)
        elif isinstance(node, _Function) and node is not function:
            reserved.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            reserved.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
    local = [*(name for name in names if name in bound - reserved), *sorted(bound - reserved - names.keys())]
    taken = {*names, *reserved} - set(local)
    short = dict(zip(local, (name for name in _short_names() if name not in taken), strict=False))
    for node in nodes:
        if isinstance(node, ast.Name):
            node.id = short.get(node.id, node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            node.name = short.get(node.name, node.name)
        elif isinstance(node, ast.arg):
            node.arg = short.get(node.arg, node.arg)


def _short_names() -> Iterator[str]:
    pairs = ("".join(pair) for pair in product(ascii_lowercase, repeat=2))
    return (name for name in chain(ascii_lowercase, pairs) if not keyword.iskeyword(name))


def _capitals() -> Iterator[str]:
    pairs = product(ascii_uppercase, ascii_uppercase + ascii_lowercase)
    return (name for name in chain(ascii_uppercase, map("".join, pairs)) if not keyword.iskeyword(name))
