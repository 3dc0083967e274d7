"""Parses the text form of a graph: `parse(str(graph), ops) == graph`."""

import ast
import re
from collections.abc import Mapping

from specc.compiler.ir.graph import Graph, Named, Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType

_TYPE = re.compile(r"(?:(?P<storage>[\w()]+):)?(?P<dtype>\w+)\[(?P<shape>[^\]]*)\]")
_HEAD = re.compile(r"graph (?P<name>[\w.]+)\((?P<inputs>.*)\) \{")
_PARAM = re.compile(r"  param (?P<name>[\w.]+) : (?P<type>\S+)")
_NODE = re.compile(
    r"  (?P<name>[\w.]+) = (?P<op>\w+)\((?P<inputs>[^)]*)\)(?P<settings>\{.*?\})?"
    r"(?: \|> (?P<epilogue>\w+)(?P<epilogue_settings>\{.*?\})?)?(?: of \((?P<members>[^)]*)\))? : (?P<types>[^{}|=]+)"
)
_RETURN = re.compile(r"  return (?P<outputs>.*)")


class GraphTextError(ValueError):
    """Raised for text that is not the text of a graph."""


def parse_type(text: str) -> TensorType:
    """Parses a type such as `bf16[T,1792]` or `int5:bf16[512,1792]`.

    Raises GraphTextError if the text is not a type.
    """
    match = _TYPE.fullmatch(text)
    if match is None:
        raise GraphTextError(f"{text!r} is not a type")
    dims = [dim for dim in match["shape"].split(",") if dim]
    shape = tuple(int(dim) if dim.isdigit() else dim for dim in dims)
    return TensorType(shape, match["dtype"], match["storage"] or "")


def _list(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(", ") if part)


def _types(text: str) -> tuple[TensorType, ...]:
    return tuple(parse_type(part) for part in text.split(", "))


def parse_op(name: str, settings: str | None, ops: Mapping[str, type[Op]]) -> Op:
    """Returns the op with the name `name` in `ops`, and with settings such as `{eps=0.5}`. Raises the errors that
    `parse` lists."""
    if name not in ops:
        raise GraphTextError(f"{name!r} is not an op")
    call = ast.parse(f"f({(settings or '{}')[1:-1]})", mode="eval").body
    assert isinstance(call, ast.Call)
    return ops[name](**{str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords})


def parse(text: str, ops: Mapping[str, type[Op]]) -> Graph:
    """Parses the text of a graph. `ops` maps the names of ops to their classes.

    Raises:
        GraphTextError: if a line is not recognized, or if a type or op is unknown. The message states the line number.
        SyntaxError, ValueError, TypeError: if the settings of an op are not literals or not fields of the op.
    """
    name = ""
    inputs: tuple[Named, ...] = ()
    scalars: tuple[str, ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    params: list[Named] = []
    nodes: list[Node] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if match := _HEAD.fullmatch(line):
                name = match["name"]
                entries = _list(match["inputs"])
                inputs = tuple(_named(entry) for entry in entries if not entry.startswith("$"))
                scalars = tuple(entry[1:] for entry in entries if entry.startswith("$"))
            elif match := _PARAM.fullmatch(line):
                params.append((match["name"], parse_type(match["type"])))
            elif match := _RETURN.fullmatch(line):
                outputs = tuple(
                    (label, ref) for label, _, ref in (part.partition("=") for part in _list(match["outputs"]))
                )
            elif match := _NODE.fullmatch(line):
                epilogue = parse_op(match["epilogue"], match["epilogue_settings"], ops) if match["epilogue"] else None
                op = parse_op(match["op"], match["settings"], ops)
                members = _list(match["members"] or "")
                nodes.append(Node(match["name"], op, _list(match["inputs"]), _types(match["types"]), epilogue, members))
            elif line != "}":
                raise GraphTextError(f"{line!r} is not a line of a graph")
        except GraphTextError as error:
            raise GraphTextError(f"line {number}: {error}") from None
    return Graph(name, inputs, tuple(params), tuple(nodes), outputs, scalars)


def _named(entry: str) -> Named:
    name, _, type = entry.partition(": ")
    return name, parse_type(type)
