"""The base class of the operations of a graph, and the interface of derivative rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Protocol

from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.records import record

# Metadata of a field that was added to an op later. Digests in locks of earlier versions do not contain such a field if
# the field has its default value.
ADDED: Mapping[str, bool] = MappingProxyType({"digested": False})


@record
class Op:
    """The base class of operations. The fields of an instance are its settings.

    Subclasses set `name` and implement the methods. A subclass overrides a class attribute if the default does not
    apply to the op.
    """

    name: ClassVar[str] = ""
    # Generated code may compute the op inside the line that reads the value.
    inline: ClassVar[bool] = True
    # The value is assigned to a name in a separate line. Lines that read the value contain this name.
    assigned: ClassVar[bool] = False
    # The op computes a gradient. In generated code, the value has the name of this node, even with an epilogue.
    gradient: ClassVar[bool] = False
    # The op is a matrix product or attention. The FLOP count of a model includes these ops, and a plan lists them.
    matrix: ClassVar[bool] = False
    # The class of work in which a plan counts the time of the op.
    work: ClassVar[str] = "pointwise"
    # The output has the features of the first input. Errors about features are reported for that input.
    keeps_features: ClassVar[bool] = False
    # torch.compile does not compile the op. A program with this op is therefore not a single graph.
    apart: ClassVar[bool] = False
    # The reason why a program with this op cannot be exported with variable sizes. Empty if such a program can be
    # exported.
    unexportable: ClassVar[str] = ""
    # The op modifies its first input, a state, and returns that input.
    in_place: ClassVar[bool] = False
    # The plan selects a kernel for the op inside fused groups.
    planned: ClassVar[bool] = False
    # The plan also selects a kernel for the op outside of fused groups.
    everywhere: ClassVar[bool] = False
    # A plan lists the op inside fused groups, because the op changes shapes.
    listed: ClassVar[bool] = False
    # The op combines tokens of a sequence, so the dims of rows and tokens cannot be flattened to one dim.
    mixes_tokens: ClassVar[bool] = False
    # Rows are independent of each other, for any number of leading dims. If False, only sequences are independent.
    rowwise: ClassVar[bool] = False
    # Rows are independent, and the first output is their mean or has one value per row. A group that ends in this op
    # may therefore be computed in chunks of rows.
    by_chunks: ClassVar[bool] = False
    # The number of consecutive sums. Values are rounded between two sums.
    chained: ClassVar[int] = 1
    # Operations per second on a GPU, relative to matrix products in the compute dtype.
    speed: ClassVar[int] = 1
    # The op is linear in its first `linear_in` inputs. The derivative therefore does not read these inputs.
    linear_in: ClassVar[int] = 0
    # If the first input is multiplied by a factor per feature, the output is multiplied by the same factor.
    homogeneous: ClassVar[bool] = False
    # Torch's compiler never recomputes the result of the op's Torch code, such as a lookup or a concatenation.
    always_stored: ClassVar[bool] = False
    # The outputs are views of the only input. The backward pass recreates the outputs, and does not save them.
    views: ClassVar[bool] = False
    # The index of the input that the op modifies in place and returns as its first output.
    written: ClassVar[int | None] = None
    # In the derivative, the node for the gradient of the first input supports `into`.
    writes_parts: ClassVar[bool] = False
    # For explanations: the condition under which the kernel of another op computes this op in a fused group, or "".
    joined_when: ClassVar[str] = ""
    # Floating-point operations per element of the first output.
    flops_per_output: ClassVar[int] = 1

    @property
    def arity(self) -> int:
        """Returns the number of inputs of the op. Any further inputs of the op's node belong to the epilogue."""
        raise TypeRuleError(f"{self.name} has no fixed arity")

    @property
    def output_labels(self) -> tuple[str, ...]:
        """Returns the names of the outputs in generated code. The result is empty if the only output has the name of
        the node."""
        return ()

    @property
    def input_labels(self) -> tuple[str, ...]:
        """Returns the names of the inputs in the code of a fused group. The result is empty if the default names are
        clear enough."""
        return ()

    @property
    def words(self) -> str:
        """Returns a short description for PLAN.md."""
        return self.name

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        """Returns two parts of a kernel name, the op and its size, such as `linear` and `n3072_k768`."""
        return self.name, ""

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        """Returns the types of the outputs. Raises TypeRuleError if the op cannot accept the inputs."""
        raise TypeRuleError(f"{self.name} has no type rule")

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        """Returns the exclusive upper bound of integer inputs. Integer inputs are indices, so the lower bound is 0."""
        raise TypeRuleError(f"{self.name} has no bound for integer inputs")

    def belonging(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns random test inputs after making their values consistent. Ops whose inputs depend on each other
        override this method."""
        return inputs

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        """Returns the number of floating-point operations.

        A multiply-add counts as two operations, and a pointwise operation as one per element.
        """
        return self.flops_per_output * outputs[0].count(sizes) if self.flops_per_output else 0

    def saved_inside(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        """Returns the number of bytes that Torch saves for the backward pass in addition to the inputs and outputs of
        the op."""
        return 0

    def site_type(self, type: TensorType) -> TensorType:
        """Returns the type with which the plan selects a kernel for an op outside of fused groups. `type` is the type
        of an input or output of the op.

        By default, symbolic dims before the last dim become B and T, as for whole sequences. Programs on sequences and
        on single tokens then share a kernel.
        """
        leading = isinstance(type.shape[0], str) if type.shape else False
        return type.with_shape("B", "T", type.width) if leading else type

    def site_sizes(self, sizes: Sizes) -> Sizes:
        """Returns the sizes of the symbolic dims for verification and measurement of kernels. `sizes` are the sizes in
        a training step."""
        return sizes

    def used_share(self, inputs: Sequence[TensorType]) -> float:
        """Returns the fraction of the op's parameters that one token uses. The parameters are among the inputs."""
        return 1.0

    def call(self, inputs: Sequence[TensorType]) -> TorchCall | None:
        """Returns the Torch call of the op, or None if only a kernel computes the op."""
        return None

    def torch(self, args: Sequence[str], inputs: Sequence[TensorType]) -> str:
        """Returns the Python expression of the op for the argument expressions `args`."""
        call = self.call(inputs)
        if call is None:
            raise TypeRuleError(f"{self.name} has no Torch call")
        return call.text(args)

    def reference(self, *inputs: Tensor) -> Tensors:
        """Computes the op in plain Torch in the precision of the inputs, independently of `call`."""
        raise TypeRuleError(f"{self.name} has no reference")

    def sampled(self, some: Sequence[Tensor], every: Sequence[Tensor], sums: Sequence[int] = ()) -> Tensors:
        """Computes the reference for a subset of the rows if the op is `rowwise`, otherwise for a subset of the
        sequences.

        Args:
            some: The inputs of the subset.
            every: The inputs with all rows, in any precision.
            sums: The indices of the outputs without rows. These outputs are computed from `every`, in the precision of
                `some`.

        Returns:
            The outputs. An output with rows has only the rows of the subset.
        """
        values = self.reference(*some)
        if not sums:
            return values
        whole = self.reference(*(value.to(part.dtype) for value, part in zip(every, some, strict=True)))
        if not isinstance(values, tuple) or not isinstance(whole, tuple):
            return whole
        return tuple(whole[i] if i in sums else value for i, value in enumerate(values))

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        """Returns the bytes that the op moves if it reads each input once and writes each output once."""
        return sum(type.bytes(sizes) for type in (*inputs, *outputs))

    def into(self, at: int) -> "Op | None":
        """Returns the variant of the op that writes its first output into a wider tensor, or None.

        The variant has the wider tensor [..., D] as an additional last input. The variant writes the output to the
        features of this tensor that begin at index `at`, and returns the tensor in place of the first output.
        """
        return None

    def derivative(self, tape: "Tape") -> "Gradients | None":
        """Adds nodes to `tape` that compute the gradients of the op's inputs. Returns one gradient per input.

        The entry of an input without a gradient is None. The result is None if the op has no derivative rule. A rule
        must be linear in the gradients of the outputs.
        """
        return None

    def retyped(self, change: Callable[[TensorType], TensorType]) -> "Op":
        """Returns the op with `change` applied to the types in its fields."""
        return self

    def settings(self) -> str:
        """Returns the fields as text. Fields with the default value are omitted."""
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return "{" + ", ".join(shown) + "}" if shown else ""


class SupportCall(Op):
    """The base class of ops that generated code computes with a support function, a helper function of the same name.
    The arguments of the function are the inputs of the op, followed by the fields of the op."""

    def call(self, inputs: Sequence[TensorType]) -> TorchCall | None:
        return TorchCall(self.name, (*map(Input, range(self.arity)), *(getattr(self, f.name) for f in fields(self))))


class Scaled(NamedTuple):
    """A gradient as the product of `value` and the scalar `by`, f32[].

    Every derivative rule is linear in the gradient. The multiplication by `by` can therefore be the last step of the
    backward pass of a fused group.
    """

    value: str
    by: str


Gradients = tuple[str | Scaled | None, ...]


class Tape(Protocol):
    """The interface through which a derivative rule reads values of a graph, and adds nodes to the graph.

    A forward value is saved for the backward pass only if a rule reads the value.
    """

    def type(self, index: int) -> TensorType:
        """Returns the type of an input of the op."""

    def input(self, index: int) -> str:
        """Returns a reference to an input of the op."""

    def output(self, index: int) -> str:
        """Returns a reference to an output of the op."""

    def grad(self, index: int = 0) -> str:
        """Returns a reference to the gradient of an output."""

    def add(self, suffix: str, op: Op, inputs: Sequence[str]) -> str:
        """Adds a node and returns the node's first output. The node has the name of the op's node, followed by
        `suffix`."""
