"""The interface of a kernel: which nodes it accepts, its rank among kernels, and the files that implement it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from specc.compiler.expr import name_of, reread
from specc.compiler.ir.graph import Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.linear import Product
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.targets import Target

NOT_REPEATABLE = "may return other bits in repeated calls, but train.deterministic is set"
Language = Literal["torch", "triton", "cutlass", "cuda"]


@dataclass(frozen=True, slots=True)
class Site:
    """A node that needs a kernel, with the types, the target, and the names for generated files.

    Attributes:
        node: The node.
        inputs: The types of the node's inputs, in order.
        target: The target to compile for.
        label: The node's path in the spec for readers, e.g. `blocks.*.mlp.up + act`.
        module: The name of the model.
        context: The maximum sequence length in tokens, or None if unknown.
        deterministic: Whether the kernel must return the same bits in repeated calls.
    """

    node: Node
    inputs: tuple[TensorType, ...]
    target: Target
    label: str
    module: str
    context: int | None = None
    deterministic: bool = False

    @property
    def key(self) -> str:
        """The node as text, without its path in the model. The lock stores measured times and tiles under this key.

        The key has the syntax of printed graphs, e.g. `dgrad(bf16[B,T,512], bf16[512,1792], bf16[B,T,1792]) |> (d,
        slope) -> d * slope : bf16[B,T,1792]`. It contains no class names, so that renaming a class in the compiler does
        not invalidate measurements.
        """
        epilogue = f" |> {self.epilogue.formula}" if self.epilogue is not None else ""
        op, types = self.node.op, ", ".join(map(str, self.node.types))
        return f"{op.name}{op.settings()}({', '.join(map(str, self.inputs))}){epilogue} : {types}"

    @property
    def epilogue(self) -> Pointwise | None:
        """The epilogue of the node, or None. Its first variables are the accumulators, one per matrix product. The
        variables of the other inputs follow."""
        epilogue = self.node.epilogue
        return epilogue if isinstance(epilogue, Pointwise) else None

    @property
    def operands(self) -> tuple[tuple[str, TensorType], ...]:
        """The variable and type of each epilogue operand that is read from memory. Accumulators are not included."""
        if self.epilogue is None:
            return ()
        types = self.inputs[self.node.op.arity :]
        return tuple(zip(self.epilogue.variables[-len(types) :], types, strict=True)) if types else ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """The files of one kernel before templates are rendered. `files` maps a file name to (template, typed template
    context).

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
    kernel whose settings can be measured has a field `tile`, whose type is the dataclass `TILE`. If `deterministic` is
    false, repeated calls may return different bits. If `portable` is true, the rendered files also run on other
    targets.
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
        """Returns the reason, with concrete numbers, why this kernel with its tile cannot compute the node; None if it
        can. The caller has already checked `needs`, the language and the target's features."""

    def rank(self, site: Site) -> int:
        """Returns the rank of this kernel at the site; by default, `RANK`. The accepting kernel with the lowest rank is
        chosen. By convention, a kernel that is written for exactly the case of the site has rank 0."""
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
        """Returns one copy of this kernel for each tile that `specc tune` measures, the most promising tile first. The
        kernel must accept the node."""
        return ()

    def padding(self, site: Site, rows: int) -> float:
        """Returns the number of operations that the kernel performs for `rows` rows, divided by the number of necessary
        operations. The kernel computes whole tiles, so the quotient is at least 1."""
        return 1.0

    def between(self, site: Site) -> tuple[TensorType, ...]:
        """Returns the types of intermediate values that are written to or read from memory in addition to the node's
        inputs and outputs. A value that is written and read back is listed twice."""
        return ()

    def workspace(self, site: Site) -> tuple[TensorType, ...]:
        """Returns the types of the values that the kernel allocates while it runs, in addition to its outputs."""
        return ()

    @abstractmethod
    def render(self, site: Site) -> Rendered:
        """Returns the files to write. Called only if `rejects` returned None."""


def unless_cpu(site: Site, reason: str) -> str | None:
    """Returns the reason why a kernel in plain Torch does not run on a GPU target; None on the CPU."""
    return f"on {site.target.name}, Torch {reason}" if "gpu" in site.target.features else None


def missing(kernel: Kernel, target: Target) -> str | None:
    """Returns a reason that lists the features that the kernel needs and the target lacks; None if the target has them
    all."""
    if kernel.language not in target.languages:
        return f"{target.name} has no {kernel.language}"
    lacking = sorted(kernel.needs - target.features)
    return f"{target.name} has no {', '.join(lacking)}" if lacking else None


def refusal(kernel: Kernel, site: Site) -> str | None:
    """Returns the reason why a kernel cannot compute a node; None if it can."""
    if reason := missing(kernel, site.target):
        return reason
    return NOT_REPEATABLE if site.deterministic and not kernel.deterministic else kernel.rejects(site)


def symbol(site: Site) -> tuple[str, str]:
    """Returns the function name and the file name, e.g. `linear_leaky_relu2` and `linear_leaky_relu2__n1792_k512`."""
    word, size = site.node.op.symbol(site.inputs)
    words = [word]
    if (epilogue := site.epilogue) is not None:
        words += [epilogue.title] if epilogue.title else [name_of(reread(output)) for output in epilogue.outputs]
    function = "_".join(filter(None, words))
    return function, f"{function}__{size}"
