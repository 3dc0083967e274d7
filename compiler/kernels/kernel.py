"""The interface of a kernel: whether it takes a node, its rank, and the files that compute it."""

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
    """A node that wants a kernel: its types, its target, and the words that generated files tell of it.

    `label` is the node's spec path as people write it, e.g. `blocks.*.mlp.up + act`; `module` the model's name.
    A sequence has at most `context` tokens, where that is known.
    """

    node: Node
    inputs: tuple[TensorType, ...]
    target: Target
    label: str
    module: str
    context: int | None = None

    @property
    def key(self) -> str:
        """The node as text, wherever in a model it stands: what a measured time and tile hold for.

        It is written as graphs are, e.g. `dgrad(bf16[B,T,512], bf16[512,1792], bf16[B,T,1792]) |> (d, slope) ->
        d * slope : bf16[B,T,1792]`, and names no class, so that renaming one in the compiler loses no measurement.
        """
        epilogue = f" |> {self.epilogue.formula}" if self.epilogue is not None else ""
        op, types = self.node.op, ", ".join(map(str, self.node.types))
        return f"{op.name}{op.settings()}({', '.join(map(str, self.inputs))}){epilogue} : {types}"

    @property
    def epilogue(self) -> Pointwise | None:
        """The epilogue over the accumulators (its first variables, one a product) and further inputs of the node."""
        epilogue = self.node.epilogue
        return epilogue if isinstance(epilogue, Pointwise) else None

    @property
    def operands(self) -> tuple[tuple[str, TensorType], ...]:
        """Variable and type of each epilogue operand that is read from memory."""
        if self.epilogue is None:
            return ()
        types = self.inputs[self.node.op.arity :]
        return tuple(zip(self.epilogue.variables[-len(types) :], types, strict=True)) if types else ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """The files of one kernel, template context included: file name -> (template, typed context).

    `module` is the Python file (no ending) that defines `function`; `tile` is for the plan page.
    """

    function: str
    module: str
    files: Mapping[str, tuple[str, object]]
    tile: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute some nodes. Subclasses answer; one module-level value of each is what the catalogue finds.

    It is asked only for nodes whose op is one that it `computes`. A kernel with settings to measure has a field `tile`
    of the dataclass `TILE`. One that is not `deterministic` may give other bits when it is called again. What a
    `portable` one writes runs on other targets too.
    """

    name: str
    language: Language
    needs: frozenset[str]
    deterministic: bool = True
    generation: ClassVar[int] = 1
    portable: ClassVar[bool] = True
    computes: ClassVar[type[Op]] = Product
    TILE: ClassVar[type | None] = None

    def rejects(self, site: Site) -> str | None:
        """Why this kernel, with its tile, cannot take the node, in words that name numbers; None where it can. `needs`,
        the language and the target's features are checked before."""
        raise TypeError(f"{type(self).__name__} does not say what it takes")

    def rank(self, site: Site) -> int:
        """Of the kernels that do not reject, the lowest rank wins; 0 is for one written for just this case."""
        raise TypeError(f"{type(self).__name__} does not say how well it suits")

    @property
    def made_of(self) -> str:
        """The description on a plan page: its language, or the library whose kernel it calls."""
        return self.language

    @property
    def package(self) -> str:
        """The package that it calls, where this is no part of the installation; empty for most."""
        return ""

    def variants(self, site: Site) -> tuple["Kernel", ...]:
        """This kernel with each tile that is worth measuring for a node it takes, the likeliest first."""
        return ()

    def padding(self, site: Site, rows: int) -> float:
        """The operations of whole tiles as a multiple of those that are needed."""
        return 1.0

    def between(self, site: Site) -> tuple[TensorType, ...]:
        """The bytes that it writes or reads beside the node's inputs and outputs, once each: a value that is written
        and read again stands twice."""
        return ()

    def render(self, site: Site) -> Rendered:
        """The files to write. Only called where `rejects` returns None."""
        raise TypeError(f"{type(self).__name__} does not say what to write")


def missing(kernel: Kernel, target: Target) -> str | None:
    """The features that the target lacks for this kernel, as a reason; None where it has all."""
    if kernel.language not in target.languages:
        return f"{target.name} has no {kernel.language}"
    lacking = sorted(kernel.needs - target.features)
    return f"{target.name} has no {', '.join(lacking)}" if lacking else None


def symbol(site: Site) -> tuple[str, str]:
    """Function and file name: `linear_leaky_relu2` and `linear_leaky_relu2__n1792_k512`."""
    epilogue = site.epilogue
    word, size = site.node.op.symbol(site.inputs)
    words = [word]
    if epilogue is not None:
        words += [epilogue.title] if epilogue.title else [name_of(reread(output)) for output in epilogue.outputs]
    function = "_".join(word for word in words if word)
    return function, f"{function}__{size}"
