"""The interface of a kernel: which nodes it accepts, its rank among kernels, and the files that implement it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from specc.compiler.expr import name_of, reread
from specc.compiler.ir.graph import Node, Op, TensorType
from specc.compiler.ops.linear import Product
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.targets import Target

Language = Literal["torch", "triton", "cutlass", "cuda"]


@dataclass(frozen=True, slots=True)
class Site:
    """A node that needs a kernel, with its types, its target, and the names used in generated files.

    Attributes:
        node: The node.
        inputs: Types of the node's inputs, in order.
        target: The target to compile for.
        label: The node's path in the spec for readers, e.g. `blocks.*.mlp.up + act`.
        module: The name of the model.
        context: The maximum sequence length in tokens, or None if unknown.
    """

    node: Node
    inputs: tuple[TensorType, ...]
    target: Target
    label: str
    module: str
    context: int | None = None

    @property
    def key(self) -> str:
        """The node as text, independent of its path in the model. Measured times and tiles are stored under it.

        It has the syntax of printed graphs, e.g. `dgrad(bf16[B,T,512], bf16[512,1792], bf16[B,T,1792]) |> (d, slope) ->
        d * slope : bf16[B,T,1792]`. It contains no class names, so that renaming a class in the compiler does not
        invalidate measurements.
        """
        epilogue = f" |> {self.epilogue.formula}" if self.epilogue is not None else ""
        op, types = self.node.op, ", ".join(map(str, self.node.types))
        return f"{op.name}{op.settings()}({', '.join(map(str, self.inputs))}){epilogue} : {types}"

    @property
    def epilogue(self) -> Pointwise | None:
        """The node's epilogue, or None. Its first variables are the accumulators, one per product, followed by the
        node's other inputs."""
        epilogue = self.node.epilogue
        return epilogue if isinstance(epilogue, Pointwise) else None

    @property
    def operands(self) -> tuple[tuple[str, TensorType], ...]:
        """Variable and type of each epilogue operand that is read from memory. Accumulators are not among them."""
        if self.epilogue is None:
            return ()
        types = self.inputs[self.node.op.arity :]
        return tuple(zip(self.epilogue.variables[-len(types) :], types, strict=True)) if types else ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """The files of one kernel before templates are rendered: file name -> (template, typed template context).

    `module` is the name, without extension, of the Python file that defines `function`. `tile` describes the tile on
    the plan page.
    """

    function: str
    module: str
    files: Mapping[str, tuple[str, object]]
    tile: str


@dataclass(frozen=True, slots=True)
class Kernel(ABC):
    """One implementation of some ops. The catalogue discovers one module-level instance of each subclass.

    A kernel is considered only for nodes whose op is an instance of `computes`. `needs` are features of targets. A
    kernel with settings to measure has a field `tile` whose type is the dataclass `TILE`. If `deterministic` is false,
    repeated calls may return different bits. If `portable` is true, the rendered files also run on other targets.
    """

    name: str
    language: Language
    needs: frozenset[str] = frozenset()
    computes: type[Op] = Product
    deterministic: bool = True
    portable: ClassVar[bool] = True
    RANK: ClassVar[int] = 0
    TILE: ClassVar[type | None] = None

    @abstractmethod
    def rejects(self, site: Site) -> str | None:
        """Returns why this kernel, with its tile, cannot compute the node, as text with concrete numbers, or None if it
        can. The caller has already checked `needs`, the language and the target's features."""

    def rank(self, site: Site) -> int:
        """Returns the rank at this site, by default `RANK`. The accepting kernel with the lowest rank is chosen. By
        convention, 0 is for a kernel written for exactly this case."""
        return self.RANK

    @property
    def made_of(self) -> str:
        """A description for the plan page: the language, or the library whose kernel is called."""
        return self.language

    @property
    def package(self) -> str:
        """The optional package that the kernel calls, or "" if it needs nothing beyond the standard installation."""
        return ""

    def variants(self, site: Site) -> tuple["Kernel", ...]:
        """Returns copies of this kernel with each tile worth measuring for a node it accepts, most promising first."""
        return ()

    def padding(self, site: Site, rows: int) -> float:
        """Returns the operations of whole tiles as a multiple of the operations needed, for `rows` rows."""
        return 1.0

    def between(self, site: Site) -> tuple[TensorType, ...]:
        """Returns the types of intermediate values that are written to or read from memory in addition to the node's
        inputs and outputs. A value that is written and read back is listed twice."""
        return ()

    @abstractmethod
    def render(self, site: Site) -> Rendered:
        """Returns the files to write. Called only if `rejects` returned None."""


def unless_cpu(site: Site, reason: str) -> str | None:
    """Returns why a kernel in plain Torch is not for targets with a GPU, or None on the CPU."""
    return f"on {site.target.name} Torch {reason}" if "gpu" in site.target.features else None


def missing(kernel: Kernel, target: Target) -> str | None:
    """Returns which features the target lacks for this kernel, as a reason, or None if it has all of them."""
    if kernel.language not in target.languages:
        return f"{target.name} has no {kernel.language}"
    lacking = sorted(kernel.needs - target.features)
    return f"{target.name} has no {', '.join(lacking)}" if lacking else None


def symbol(site: Site) -> tuple[str, str]:
    """Returns function name and file name, e.g. `linear_leaky_relu2` and `linear_leaky_relu2__n1792_k512`."""
    word, size = site.node.op.symbol(site.inputs)
    words = [word]
    if (epilogue := site.epilogue) is not None:
        words += [epilogue.title] if epilogue.title else [name_of(reread(output)) for output in epilogue.outputs]
    function = "_".join(filter(None, words))
    return function, f"{function}__{size}"
