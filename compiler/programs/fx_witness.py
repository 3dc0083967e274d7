"""The first check of a generated module: a torch.fx trace of the module must equal the plan, node by node."""

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from specc.compiler.expr import PRIMITIVES, Binary, Call, Compare, Expr, Neg, Var, decided, number, reread, variables
from specc.compiler.ir.graph import Graph, Node, node_of
from specc.compiler.ir.torch_call import ARITHMETIC, COMPARISONS, Input, TorchCall
from specc.compiler.ir.types import DTYPES, TensorType
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.region import Fused, Scan
from specc.compiler.programs.programs import Parameter, Programs, class_name, flatten, group_functions, scalar_values

if TYPE_CHECKING:
    from torch import fx, nn

MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
KEYWORDS = {keyword for primitive in PRIMITIVES.values() for keyword in primitive.torch_keywords}


class Mismatch(Exception):
    """Raised if the generated module differs from the plan. The message names the node."""


def trace(module: "nn.Module", source: ModuleType, method: str) -> "fx.Graph":
    """Returns the fx graph of one method of a generated module. `source` is the imported model.py. Each call of a
    function of model.py is one node."""
    import types

    from torch import arange, fx

    class Tracer(fx.Tracer):
        """A tracer that records a loop over time as one node, because the number of iterations depends on the input."""

        def is_leaf_module(self, m: "nn.Module", module_qualified_name: str) -> bool:
            return self.traced_func_name != "step" and hasattr(m, "step")

    functions = [v for name, v in vars(source).items() if isinstance(v, types.FunctionType) and name != "weights"]
    tracer = Tracer(autowrap_functions=(*functions, arange))
    tracer.traced_func_name = method
    arguments = inspect.signature(getattr(module, method)).parameters.values()
    defaults = {entry.name: entry.default for entry in arguments if entry.default is not entry.empty}
    with _whole_groups(source), _plain_methods(source):
        return tracer.trace(module, concrete_args=defaults or None)


@contextmanager
def _whole_groups(source: ModuleType) -> Iterator[None]:
    """A context in which fx records each autograd function of model.py as one node."""
    from torch import autograd

    groups = [v for v in vars(source).values() if isinstance(v, type) and issubclass(v, autograd.Function)]
    try:
        for group in groups:
            setattr(group, "apply", staticmethod(_recorded(group)))  # noqa: B010  (for mypy it is a method)
        yield
    finally:
        for group in groups:
            del group.apply


@contextmanager
def _plain_methods(source: ModuleType) -> Iterator[None]:
    """A context in which classes of model.py have plain methods in place of methods with a recomputation wrapper. The
    wrapper recomputes the method's values in the backward pass."""
    classes = [value for value in vars(source).values() if isinstance(value, type)]
    wrapped = [(c, n, v) for c in classes for n, v in list(vars(c).items()) if hasattr(v, "__wrapped__")]
    try:
        for cls, name, value in wrapped:
            setattr(cls, name, value.__wrapped__)
        yield
    finally:
        for cls, name, value in wrapped:
            setattr(cls, name, value)


def _recorded(group: Any) -> Callable[..., Any]:
    """Returns a replacement for `group.apply`. fx records a call of the replacement as a call of a function with the
    group's name."""
    apply = group.apply

    def run(*args: Any) -> Any:
        return apply(*args)

    def recorded(*args: Any) -> Any:
        from torch import fx

        proxy = next((arg for arg in args if isinstance(arg, fx.Proxy)), None)
        return apply(*args) if proxy is None else proxy.tracer.create_proxy("call_function", run, args, {})

    run.__name__ = group.__name__
    return recorded


def round_trip(programs: Programs, program: str, traced: "fx.Graph") -> int:
    """Checks the ops, settings, paths and wiring of a traced program against the plan.

    Returns the number of matching nodes. Raises Mismatch if the trace and the plan differ.
    """
    graph = flatten(programs, programs.program(program), groups=False)
    seen = compare(graph, scalar_values(programs.program(program)), traced, group_functions(programs))
    if unmatched := [node.name for node in graph.nodes if node.name not in seen]:
        raise Mismatch(f"the plan has {unmatched[0]}, but the module does not compute it")
    return len(seen)


def compare(
    graph: Graph, scalars: Mapping[str, float], traced: "fx.Graph", groups: Mapping[str, str] | None = None
) -> Mapping[str, "fx.Node"]:
    """Checks a trace against a graph with one output.

    Args:
        graph: the flattened graph of the plan.
        scalars: the values of the scalars that calls pass. The key of a scalar is `PATH.name`, where PATH is the path
            of the call.
        traced: the fx graph.
        groups: the function name of each fused group, by the group's name.

    Returns:
        The traced nodes. The keys are the names of the graph nodes that the traced nodes compute.

    Raises:
        Mismatch: if the trace and the graph differ.
    """
    return _Comparison(graph, scalars, groups or {}).run(traced)


def check_types(
    programs: Programs, program: str, traced: "fx.Graph", module: "nn.Module", rows: int, tokens: int
) -> int:
    """Runs a traced program on tensors without data. Checks the dtype and shape of every matched value. In this run,
    parameters have the dtypes of the plan.

    Args:
        programs: The programs of the plan.
        program: The name of the traced program.
        traced: The fx graph.
        module: The generated module.
        rows: The size of the batch dim `B`.
        tokens: The size of the dims `T` and `S`.

    Returns:
        The number of values checked.

    Raises:
        Mismatch: If the trace and the plan differ in structure, dtype or shape.
    """
    import torch
    from torch import fx, nn
    from torch.fx.experimental import _config as config

    graph = flatten(programs, programs.program(program), groups=False)
    seen = compare(graph, scalar_values(programs.program(program)), traced, group_functions(programs))
    sizes = {"B": rows, "T": tokens, "S": tokens}
    names: dict[fx.Node, list[str]] = {}
    for name, actual in seen.items():
        names.setdefault(actual, []).append(name)
    checked = 0

    class Checked(fx.Interpreter):
        """An interpreter that compares each value as soon as it is computed, because in-place ops may change the value
        later."""

        def run_node(self, n: fx.Node) -> Any:
            nonlocal checked
            value = super().run_node(n)
            values = value if isinstance(value, tuple) else (value,)
            for name in names.get(n, ()):
                types = graph.by_name[name].types
                if len(values) == len(types) and all(isinstance(each, torch.Tensor) for each in values):
                    for type, each in zip(types, values, strict=True):
                        _check_type(name, type, each, sizes)
                    checked += 1
            return value

    inputs = [torch.zeros(type.extents(sizes), dtype=_dtype(type), device="meta") for _, type in graph.inputs]
    dtypes = {param.name: _dtype(param) for param in programs.params}
    without_data = {id(v): nn.Parameter(v.to("meta", dtypes[name])) for name, v in module.named_parameters()}
    # In this run, a selection by a condition keeps all elements, for example the selection of tokens that are not
    # padding.
    whole = config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
    with torch.device("meta"), whole:
        Checked(fx.GraphModule(copy.deepcopy(module, without_data).to("meta"), traced)).run(*inputs)
    return checked


def _dtype(type: TensorType | Parameter) -> Any:
    import torch

    return getattr(torch, DTYPES[type.dtype].removeprefix("torch."))


def _check_type(name: str, type: TensorType, value: Any, sizes: Mapping[str, int]) -> None:
    if tuple(value.shape) != type.extents(sizes) or value.dtype != _dtype(type):
        raise Mismatch(f"{name} is {type} in the plan, but the module computes {value.dtype} {list(value.shape)}")


@dataclass
class _Comparison:
    """Traverses the plan and the trace together, from the output to the inputs. `seen` maps plan nodes to the traced
    nodes that compute them."""

    graph: Graph
    scalars: Mapping[str, float]
    groups: Mapping[str, str]
    seen: dict[str, "fx.Node"] = field(default_factory=dict)
    waiting: list[tuple[Node, int, Any]] = field(default_factory=list)

    def run(self, traced: "fx.Graph") -> dict[str, "fx.Node"]:
        """Compares all nodes, from the output to the inputs. Returns `seen`."""
        (output,) = (node for node in traced.nodes if node.op == "output")
        ((_, ref),) = self.graph.outputs
        self.value(ref, output.args[0])
        while self.waiting:
            self.node(*self.waiting.pop())
        return self.seen

    def value(self, ref: str, actual: Any) -> None:
        if ref[0] == "$":
            self.expect(actual == self.scalars[ref[1:]], ref, f"is {self.scalars[ref[1:]]}", actual)
        elif ref[0] == "@":
            same = actual.op == "get_attr" and actual.target == ref[1:]
            self.expect(same, ref, f"is parameter {ref[1:]}", actual)
        elif node_of(ref) in self.graph.by_name:
            self.waiting.append((self.graph.by_name[node_of(ref)], int(ref.partition(":")[2] or 0), actual))
        else:
            self.expect(actual.op == "placeholder" and actual.target == ref, ref, "is an input", actual)

    def node(self, node: Node, index: int, actual: Any) -> None:
        if len(node.types) > 1:
            matches = self.called(actual) == "getitem" and actual.args[1] == index
            self.expect(matches, node.name, f"gives {index}", actual)
            actual = actual.args[0]
        known = self.seen.get(node.name)
        if known is not None:
            self.expect(known is actual, node.name, "is computed once", actual)
            return
        self.seen[node.name] = actual
        if isinstance(node.op, Scan):
            self.expect(actual.op == "call_module" and actual.target == node.op.at, node.name, "is a loop", actual)
            which = {"training": True} if node.op.drops else {}
            self.expect(actual.kwargs == which, node.name, f"runs {node.op.callee}", actual)
            for ref, have in zip(node.inputs, actual.args, strict=True):
                self.value(ref, have)
            return
        if isinstance(node.op, Pointwise):
            values = dict(zip(node.op.variables, node.inputs, strict=True))
            self.expression(node, decided(reread(node.op.outputs[0])), values, actual)
            return
        types = [self.graph.types[ref] for ref in node.inputs]
        if isinstance(node.op, Fused):
            self.group(node, self.groups[node.op.group], actual)
        elif (call := node.op.call(types)) is not None:
            self.call(node, call, actual)
        else:
            self.kernel(node, actual, node.op.name if node.op.everywhere else node.op.symbol(types)[0])

    def group(self, node: Node, function: str, actual: Any) -> None:
        """Checks a fused group. The trace must contain a call of the group's function. If the group has a gradient, the
        trace must apply an autograd function instead.

        The trace may flatten the rows of an argument to one dim. If so, the trace may also unflatten the rows of the
        result, or view the result in the shape of the argument.
        """
        if self.called(actual) == function:
            self.call(node, TorchCall(function, tuple(map(Input, range(len(node.inputs))))), actual)
            return
        shape = None
        if self.called(actual) == "unflatten":
            actual, zero, leading = actual.args
            flattened = leading.args[0]
            ends = self.called(leading) == "getitem" and leading.args[1] == slice(None, -1)
            self.expect(zero == 0 and ends and self.called(flattened) == "getattr", node.name, "has its rows", leading)
            shape = flattened.args[0]
        elif self.called(actual) == "view_as":
            actual, shape = actual.args
        self.expect(self.called(actual) == class_name(function), node.name, f"is a call of {function}", actual)
        self.expect(len(actual.args) == len(node.inputs), node.name, f"takes {len(node.inputs)} arguments", actual)
        arguments = [have.args[0] if self.called(have) == "flatten" else have for have in actual.args]
        self.expect(shape is None or shape in arguments, node.name, "has the rows of an input", actual)
        for ref, have, passed in zip(node.inputs, arguments, actual.args, strict=True):
            self.expect(have is passed or passed.args[1:] in ((), (0, -2)), node.name, "receives rows", passed)
            self.value(ref, have)

    def kernel(self, node: Node, actual: Any, function: str) -> None:
        """Checks a call of a kernel's function. The traced name is `function`, followed by `_` and the title of the
        epilogue if there is one. The suffix from `__` on, which states a shape, is ignored."""
        tail = f"_{node.epilogue.title}" if isinstance(node.epilogue, Pointwise) else ""
        name, wanted = self.called(actual).partition(".")[0].partition("__")[0], f"{function}{tail}"
        self.expect(name == wanted, node.name, f"is a call of {wanted}", actual)
        self.expect(len(actual.args) == len(node.inputs), node.name, f"takes {len(node.inputs)} arguments", actual)
        for ref, have in zip(node.inputs, actual.args, strict=True):
            self.value(ref, have)

    def call(self, node: Node, wanted: TorchCall, actual: Any) -> None:
        """Checks that `actual` is the call `wanted`. Positional arguments may be recorded as keyword arguments."""
        # An overload of a Torch op has the name of the op as its prefix
        name = self.called(actual).removesuffix(".default")
        self.expect(name == wanted.recorded, node.name, f"is a call of {wanted.recorded}", actual)
        count, keywords = len(wanted.args), dict(wanted.keywords)
        arguments = (*actual.args, *(value for key, value in actual.kwargs.items() if key not in keywords))
        self.expect(len(actual.args) <= count <= len(arguments), node.name, f"takes {count} arguments", actual)
        self.expect(keywords.keys() <= actual.kwargs.keys(), node.name, f"has {keywords}", actual)
        pairs = (*zip(wanted.args, arguments, strict=False), *((v, actual.kwargs[k]) for k, v in wanted.keywords))
        for want, have in pairs:
            self.argument(node, want, have)

    def argument(self, node: Node, want: object, have: Any) -> None:
        if isinstance(want, Input):
            self.value(node.inputs[want.index], have)
        elif isinstance(want, TorchCall):
            self.call(node, want, have)
        elif isinstance(want, tuple) and any(isinstance(item, Input | TorchCall) for item in want):
            self.expect(isinstance(have, tuple) and len(have) == len(want), node.name, f"has {len(want)} items", have)
            for item, other in zip(want, have, strict=True):
                self.argument(node, item, other)
        else:
            self.expect(want == have, node.name, f"has {want}", have)

    def expression(self, node: Node, expr: Expr, values: Mapping[str, str], actual: Any) -> None:
        if isinstance(expr, Var):
            ref = values[expr.name]
            if self.called(actual) in ("float", "bfloat16", "half") and self.called(actual) != self.planned_call(ref):
                actual = actual.args[0]
            self.value(ref, actual)
        elif not variables(expr):  # Python evaluates constants before fx traces them
            # Some functions accept only tensors, so a number is passed as a tensor
            value, filled = number(expr), self.called(actual) == "full_like"
            have = actual.args[1] if filled and len(actual.args) == 2 else actual
            self.expect(have == value, node.name, f"has the number {value}", actual)
        elif isinstance(expr, Neg) and isinstance(expr.a, Binary) and expr.a.op in ("*", "/"):
            self.expression(node, Binary(expr.a.op, -expr.a.a, expr.a.b), values, actual)  # -(2 * x) is printed -2 * x
        elif isinstance(expr, Neg):
            self.operation(node, "neg", (expr.a,), values, actual)
        elif isinstance(expr, Binary):
            self.operation(node, ARITHMETIC[expr.op], (expr.a, expr.b), values, actual)
        elif isinstance(expr, Compare):
            op, a, b = expr.op, expr.a, expr.b
            if not variables(a):  # Python calls the reflected method of the tensor on the right
                op, a, b = MIRRORED[op], b, a
            self.operation(node, COMPARISONS[op], (a, b), values, actual)
        elif isinstance(expr, Call):
            primitive = PRIMITIVES[expr.function]
            keywords = {k: value for k, value in getattr(actual, "kwargs", {}).items() if k in KEYWORDS}
            self.expect(keywords == primitive.torch_keywords, node.name, f"has {expr.function}", actual)
            self.operation(node, primitive.torch.partition(".")[2], expr.args, values, actual)

    def planned_call(self, ref: str) -> str:
        """Returns the name of the function or method that computes the value `ref` in the plan, or "" if no single call
        computes the value."""
        planned = self.graph.by_name.get(node_of(ref)) if ref[0] not in "$@" else None
        if planned is None or isinstance(planned.op, Scan | Pointwise | Fused):
            return ""
        call = planned.op.call([self.graph.types[each] for each in planned.inputs])
        return "" if call is None else call.recorded

    def operation(self, node: Node, name: str, parts: tuple[Expr, ...], values: Mapping[str, str], actual: Any) -> None:
        self.expect(self.called(actual) == name, node.name, f"has {name}", actual)
        # fx may record a positional argument by keyword
        arguments = [*actual.args, *actual.kwargs.values()][: len(parts)]
        self.expect(len(arguments) == len(parts), node.name, f"{name} takes {len(parts)} arguments", actual)
        for part, have in zip(parts, arguments, strict=True):
            self.expression(node, part, values, have)

    @staticmethod
    def called(actual: Any) -> str:
        """Returns the name of the function, method or module that a traced node calls."""
        target = getattr(actual, "target", None)
        if isinstance(target, str):
            return target
        name = getattr(target, "__name__", "")
        if target is getattr:
            return "getattr"
        return "getitem" if target is operator.getitem else str(name)

    @staticmethod
    def expect(holds: bool, name: str, what: str, actual: Any) -> None:
        if not holds:
            shown = actual.format_node() if hasattr(actual, "format_node") else repr(actual)
            raise Mismatch(f"{name} {what} in the plan, but the module has {shown}")
