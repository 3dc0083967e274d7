"""Shortens the names of local variables and parameters, which makes a submission about 8 % smaller.

Names of attributes, functions, classes and modules do not change, so that a traceback names the same functions as the
sources of specc. Parameters that any call passes by keyword do not change either.
"""

import ast
import builtins
import keyword
from collections.abc import Collection, Iterator
from itertools import chain, product
from string import ascii_lowercase

INTROSPECTION = {"locals", "vars", "eval", "exec"}  # the variables of functions that call one of these are not renamed
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def shorten(tree: ast.Module, outer: Collection[str], keywords: Collection[str], opaque: Collection[str]) -> None:
    """Renames the local variables and parameters of all functions and methods at the top of a module, in place.

    A function and the functions inside it share one mapping of names. A name that is also bound outside of functions
    is not renamed, because a nested function may read the outer variable.

    Args:
        tree: the module.
        outer: the names that the module binds outside of functions.
        keywords: the names of the keyword arguments of all calls.
        opaque: the classes of the module whose methods may be called from outside the package, with any keyword.
    """
    fixed = {*outer, *vars(builtins), *keywords}
    for statement in tree.body:
        parameters = not (isinstance(statement, ast.ClassDef) and statement.name in opaque)
        for each in statement.body if isinstance(statement, ast.ClassDef) else [statement]:
            if isinstance(each, _Function):
                _shorten_function(each, fixed, parameters)


def _shorten_function(function: _Function, fixed: Collection[str], parameters: bool) -> None:
    nodes = list(ast.walk(function))
    # These statements bind names by special rules
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
    """Yields a, b, .. z, aa, ab, .. zz, without keywords."""
    pairs = ("".join(pair) for pair in product(ascii_lowercase, repeat=2))
    return (name for name in chain(ascii_lowercase, pairs) if not keyword.iskeyword(name))
