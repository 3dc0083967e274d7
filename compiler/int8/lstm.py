"""The int8 form of an LSTM. One matrix product computes the contribution of x to the gates of all steps. One op per
step multiplies h and computes the next state."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from specc.compiler.int8.editor import Editor, Factor
from specc.compiler.int8.fake_quantized_lstm import fake_quantized_gates
from specc.compiler.int8.form import Int8Form, sums_of, title_of, weighed
from specc.compiler.int8.lstm_loop import Step, add_loop
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType, TypeRuleError
from specc.compiler.ops.int8_lstm import Int8LstmStep
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.ops.quantized import Int8Linear, wide
from specc.compiler.ops.recurrent import Lstm, LstmCell
from specc.compiler.ops.sequence import Concat
from specc.compiler.ops.shape import Last, Part, TimeMajor

# A function that adds the gates: (graph, original node, name, x, factors, whether the direction runs backward in time)
# -> (gates, step).
Direction = Callable[[Editor, Node, str, str, Sequence[Factor], bool], tuple[str, Step]]


def _factors(node: Node, first: int, biases: int, directions: int) -> tuple[Factor, ...]:
    """Returns the two matrix products of each direction. If a direction has a single bias vector, this bias belongs to
    the product with h."""
    factors: list[Factor] = []
    for d in range(directions):
        into, hidden, *vectors = node.inputs[first + d * (2 + biases) : first + (d + 1) * (2 + biases)]
        factors.append(Factor(into, vectors[0] if biases == 2 else "", (0,)))
        factors.append(Factor(hidden, vectors[-1], (1,), (0,), d, directions))
    return tuple(factors)


def _check(edit: Editor, node: Node, factors: Sequence[Factor]) -> int:
    _, size = edit.types[factors[1].weight].shape
    assert isinstance(size, int)
    if size % 4:
        raise TypeRuleError(f"{node.name} has {size} features, but int8 gates require a multiple of 4")
    for factor in factors:
        if factor.bias and not edit.integer(factor.bias):
            raise TypeRuleError(f"{factor.bias[1:]} is not int8, but its weight {factor.weight[1:]} is")
    return size


def _gates_of(edit: Editor, node: Node, name: str, codes: Sequence[str], factor: Factor) -> str:
    held = sums_of(edit, factor.weight, factor.bias)
    expr, operands = weighed(edit, name, codes, factor.weight, held, node)
    gates = TensorType((*edit.types[codes[0]].shape[:-1], edit.types[held[0]].shape[0]), "f32")
    epilogue = Pointwise((str(expr),), ("p", "scale", *operands.values()), title=title_of(expr, gates))
    return edit.add(Node(name, Int8Linear(), (codes[0], *held, *operands), (gates,), epilogue, (name,)), node)


def _held(edit: Editor, hidden: Factor) -> tuple[str, str, str, str]:
    return *sums_of(edit, hidden.weight, hidden.bias), edit.inverse(hidden.weight)


class Int8CellForm(Int8Form):
    """The int8 form of a single LSTM step."""

    takes: ClassVar[type[Op]] = LstmCell

    def factors(self, graph: Graph, node: Node) -> tuple[Factor, ...]:
        assert isinstance(node.op, LstmCell)
        return _factors(node, 3, node.op.biases, 1)

    def rewrite(self, edit: Editor, node: Node, factors: Sequence[Factor]) -> None:
        x, h, c, *_ = node.inputs
        _check(edit, node, factors)
        codes = edit.codes(x, factors[0].weight, node)
        scope = node.name.rpartition(".")[0]
        gates = _gates_of(edit, node, f"{scope}.gates_x", codes, factors[0])
        row = edit.add_op(f"{scope}.gates_step", Last(), (gates,), node)
        op = Int8LstmStep(edit.input_bits(factors[1].weight))
        step = edit.add_op(f"{scope}.step", op, (h, c, row, *_held(edit, factors[1])), node)
        edit.replace(node, step, f"{step}:1")


class Int8LstmForm(Int8Form):
    """The int8 form of an LSTM over a whole sequence: a loop over time steps."""

    takes: ClassVar[type[Op]] = Lstm

    def factors(self, graph: Graph, node: Node) -> tuple[Factor, ...]:
        assert isinstance(node.op, Lstm)
        return _factors(node, 3, node.op.biases, node.op.directions)

    def rewrite(self, edit: Editor, node: Node, factors: Sequence[Factor]) -> None:
        for d in range(0, len(factors), 2):
            _check(edit, node, factors[d : d + 2])
        self._replace(edit, node, factors, _gates_of_steps)

    def fake_quantize(self, edit: Editor, node: Node, factors: Sequence[Factor]) -> None:
        self._replace(edit, node, factors, fake_quantized_gates)

    def _replace(self, edit: Editor, node: Node, factors: Sequence[Factor], direction: Direction) -> None:
        """Replaces the node by one loop over time per direction. Concatenates the outputs of the loops."""
        x, h, c, *_ = node.inputs
        directions, scope = len(factors) // 2, node.name.rpartition(".")[0]
        parts: list[tuple[str, str, str]] = []
        for d in range(directions):
            both, name = factors[2 * d : 2 * d + 2], f"{scope}.back" if d else f"{scope}.forward"
            state = [
                edit.add_op(f"{name}_{word}", Part(d, directions), (ref,), node) if directions > 1 else ref
                for word, ref in (("h", h), ("c", c))
            ]
            gates, step = direction(edit, node, name, x, both, bool(d))
            parts.append(add_loop(edit, node, name, (x, *state, gates), step, bool(d)))
        if directions == 1:
            edit.replace(node, *parts[0])
            return
        joined = [
            edit.add_op(f"{scope}.both_{word}", Concat(), sides, node)
            for word, sides in zip("yhc", zip(*parts, strict=True), strict=True)
        ]
        edit.replace(node, *joined)


def _gates_of_steps(
    edit: Editor, node: Node, name: str, x: str, factors: Sequence[Factor], backward: bool
) -> tuple[str, Step]:
    """Adds the nodes that compute the contribution of x to the gates of one direction. Returns the reference of this
    contribution, and the step.

    The gates are stored time-major, so the gates of one step are contiguous.
    """
    into, hidden = factors
    codes = edit.codes(x, into.weight, node)
    major = [
        edit.add_op(f"{name}_{word}", TimeMajor(backward), (ref,), node)
        for word, ref in zip(("codes", "second"), codes, strict=False)
    ]
    gates = _gates_of(edit, node, f"{name}_x", major, into)
    constants = dict(zip(("codes", "offset", "scale", "inverse"), _held(edit, hidden), strict=True))
    bits = edit.input_bits(hidden.weight)

    def update(b: Builder, h: str, c: str, x: str, constants: Sequence[str]) -> str:
        row = b.add("recurrent.x", Last(), (x,))
        return b.add("recurrent.step", Int8LstmStep(bits), (h, c, row, *constants))

    steps = edit.add_op(f"{name}_steps", TimeMajor(back=True), (gates,), node)
    return steps, Step(f"{wide(bits)}_steps", constants, update)


INT8_CELL = Int8CellForm("int8_lstm_cell")
INT8_LSTM = Int8LstmForm("int8_lstm")
