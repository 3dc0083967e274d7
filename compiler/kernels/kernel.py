"""The interface of a kernel: the nodes that the kernel accepts, its rank among kernels, and the files that implement
the kernel."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

from specc.compiler.expr import name_of, reread
from specc.compiler.ir.graph import Node
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import TensorType
from specc.compiler.ops.linear import Product
from specc.compiler.ops.pointwise import Pointwise
from specc.compiler.records import record
from specc.compiler.targets import Target

NOT_REPEATABLE = "may return other bits in repeated calls, but train.deterministic is set"
Language = Literal["torch", "triton", "cutlass", "cuda"]


@record
class Site:
    """A node that needs a kernel, with its types, its target, and its name in generated files.

    Attributes:
        node: The node.
        inputs: The types of the node's inputs, in order.
        target: The target to compile for.
        label: A readable path of the node in the spec, such as `blocks.*.mlp.up + act`.
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
        """The node as text, without its path in the model. The lock file stores measured times and tiles under this
        key.

        The key has the syntax of printed graphs, such as `dgrad(bf16[B,T,512], bf16[512,1792], bf16[B,T,1792]) |> (d,
        slope) -> d * slope : bf16[B,T,1792]`. The key contains no class names of the compiler, so renamed classes keep
        their measurements.
        """
        epilogue = f" |> {self.epilogue.formula}" if self.epilogue is not None else ""
        op, types = self.node.op, ", ".join(map(str, self.node.types))
        return f"{op.name}{op.settings()}({', '.join(map(str, self.inputs))}){epilogue} : {types}"

    @property
    def epilogue(self) -> Pointwise | None:
        """The epilogue of the node, or None. The first variables of the epilogue are the accumulators, one per matrix
        product. The operands follow."""
        epilogue = self.node.epilogue
        return epilogue if isinstance(epilogue, Pointwise) else None

    @property
    def operands(self) -> tuple[tuple[str, TensorType], ...]:
        """The variable and the type of each epilogue operand in memory. Accumulators are not included."""
        if self.epilogue is None:
            return ()
        types = self.inputs[self.node.op.arity :]
        return tuple(zip(self.epilogue.variables[-len(types) :], types, strict=True)) if types else ()


class Rendered(NamedTuple):
    """The template files of one kernel, not yet rendered. `files` maps each file name to a template and its context.

    `module` is the name of the Python file, without extension, that defines `function`. `tile` is text for PLAN.md.
    """

    function: str
    module: str
    files: Mapping[str, tuple[str, object]]
    tile: str


@record
class Kernel(ABC):
    """One implementation of some ops. The compiler finds all module-level instances in compiler/kernels.

    Attributes:
        language: The language of the kernel's files.
        needs: The features that a target must have.
        computes: The class of ops that the kernel may compute.
        deterministic: Whether repeated calls return the same bits.
        portable: Whether the rendered files also run on other targets.
        RANK: The default of `rank`.
        TILE: The dataclass of the field `tile`, if tiles can be measured.
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
        """Returns the reason why this kernel, with its tile, cannot compute the node. If a size exceeds a limit, the
        reason states both numbers. Returns None if the kernel can compute the node.

        The caller has already compared the language and the features in `needs` with the target.
        """

    def rank(self, site: Site) -> int:
        """Returns the rank of this kernel at the site, by default `RANK`. Without measurements, the plan selects the
        kernel with the lowest rank among the kernels that accept the site. A kernel that was written for exactly this
        case has rank 0."""
        return self.RANK

    @property
    def made_of(self) -> str:
        """A description for PLAN.md: the language, or the library that the kernel calls."""
        return self.language

    @property
    def package(self) -> str:
        """The name of the optional package that the kernel calls. The name is empty if the standard installation is
        enough."""
        return ""

    def variants(self, site: Site) -> tuple["Kernel", ...]:
        """Returns a copy of this kernel for each tile that `specc tune` measures, most promising first. Callers pass
        only sites that the kernel accepts."""
        return ()

    def padding(self, site: Site, rows: int) -> float:
        """Returns the number of operations that the kernel executes for `rows` rows, divided by the number of necessary
        operations. The quotient is at least 1, because the kernel computes whole tiles."""
        return 1.0

    def between(self, site: Site) -> tuple[TensorType, ...]:
        """Returns the types of intermediate values that pass through memory, without inputs and outputs. A value that
        is written and read back is listed twice."""
        return ()

    def workspace(self, site: Site) -> tuple[TensorType, ...]:
        """Returns the types of the values that the kernel allocates while it runs, without its outputs."""
        return ()

    def written_over(self, site: Site) -> Mapping[int, int]:
        """Returns the outputs that the kernel writes into the memory of an input. The keys are the indices of the
        outputs, and the values are the indices of the inputs. No node reads such an input after the kernel."""
        return {}

    @abstractmethod
    def render(self, site: Site) -> Rendered:
        """Returns the files to write for a site that the kernel accepts."""


def unless_cpu(site: Site, reason: str) -> str | None:
    """Returns the reason why a kernel in plain Torch rejects a GPU target. Returns None for the CPU. `reason` states
    how Torch would compute the node on a GPU, such as `would run each part as a separate kernel`."""
    return f"on {site.target.name}, Torch {reason}" if "gpu" in site.target.features else None


def lacks_memory(site: Site, needed: int, use: str) -> str | None:
    """Returns the reason to reject a kernel if the target has less shared memory than the `needed` bytes, otherwise
    None. `use` names the contents of the memory."""
    if needed <= site.target.shared_memory:
        return None
    return f"needs {needed:,} bytes of shared memory for {use}; {site.target.name} has {site.target.shared_memory:,}"


def missing(kernel: Kernel, target: Target) -> str | None:
    """Returns a reason such as `sm80 has no tma` if the target lacks a language or a feature that the kernel needs.
    Returns None if the target lacks nothing."""
    if kernel.language not in target.languages:
        return f"{target.name} has no {kernel.language}"
    lacking = sorted(kernel.needs - target.features)
    return f"{target.name} has no {', '.join(lacking)}" if lacking else None


def refusal(kernel: Kernel, site: Site) -> str | None:
    """Returns the reason why a kernel cannot compute a node. Returns None if the kernel can compute the node."""
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
