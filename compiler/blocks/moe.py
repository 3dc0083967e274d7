"""A mixture of experts: a router chooses a few feed-forward networks for each token."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specc.compiler.blocks.context import Lowered, LoweringContext, Shape
from specc.compiler.blocks.mlp import FeedForward, Mlp
from specc.compiler.blocks.wiring import WiringText
from specc.compiler.errors import counted
from specc.compiler.ir.builder import Builder
from specc.compiler.ir.graph import output_ref
from specc.compiler.ir.op import Op
from specc.compiler.ir.types import Dim, TensorType
from specc.compiler.ops.experts.dispatch import Combine, Dispatch, GroupedLinear, OfExperts, SortByExpert
from specc.compiler.ops.experts.load import AttachLoad, BalanceLoss, ExpertLoad
from specc.compiler.ops.experts.router import BestGroups, LogSumExp, ScoresOf, ShareOfSum, Softmax, TopExperts
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.loss import MeanSquare
from specc.compiler.ops.pointwise import Pointwise, pointwise
from specc.compiler.programs.init import constant
from specc.compiler.strict import Positive, PositiveFloat, Problem, StrictModel, later

SCORES: Mapping[str, Op] = {"softmax": Softmax(), "sigmoid": Pointwise(("sigmoid(x)",), ("x",))}
# Widths must be multiples of this number, because grouped matrix products on a GPU need rows whose size is a multiple
# of 16 bytes.
MULTIPLE = 8
BALANCE = ("balance", "sequence_balance")  # the losses that balance the load
SINGLE_EXPERT = "with one expert per token, the normalized weight is always 1, so the router would not learn"

Biases = Annotated[tuple[Literal["router", "up", "gate", "down"], ...], Field(min_length=1, max_length=4)]


class Router(StrictModel):
    """The router, which chooses the experts of each token. Logits and scores are computed in f32.

    Attributes:
        score: how logits become scores: by the softmax over the experts, or by the sigmoid of each logit.
        bias: whether experts are chosen by the scores plus a bias per expert. The weights do not include the bias. The
            gradient of an expert's bias is the load of the expert minus the mean load. The optimizer `sign` can
            therefore balance the load without a loss (Wang et al. 2024, arXiv 2408.15664).
        normalize: whether the weights of a token's experts are divided by their sum. The weights are the experts'
            scores.
        scale: the factor of the weights.
        groups: the number of groups into which the experts are divided. All groups have the same size. The experts of a
            token are all from `top_groups` groups (DeepSeek-V3, arXiv 2412.19437).
        top_groups: the number of groups from which a token's experts are chosen. By default, all groups.
        group_best: groups are ranked by the sum of their `group_best` largest scores.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    bias: bool = False
    normalize: bool = False
    scale: PositiveFloat = 1.0
    groups: Positive = later(1)
    top_groups: Positive | None = later(None)
    group_best: Positive = later(2)


class Moe(FeedForward):
    """The weighted sum of `top_k` experts per token, which a router chooses. Each expert is an MLP. No token is
    dropped, and no choice depends on another token.

    An `auxiliary` loss term can select these losses of the layer. `balance` is 1 for equal loads (Fedus et al. 2022).
    `sequence_balance` is the same loss within each sequence. `z` is the mean of log(sum(exp(logits))) ** 2 (Zoph et
    al. 2022).

    Attributes:
        experts: the number of experts.
        top_k: the number of experts per token. With 1, the layer is as in Switch Transformers.
        shared_experts: the number of additional experts that every token uses, with weight 1. Shared experts are
            computed as one MLP. The hidden width of this MLP is `shared_experts` times the hidden width of an expert.
        router: the choice of experts.
        router_input: an expression for the input of the router. By default, the input of the layer. `x0` is the
            embedding of the token.
        bias: whether the matrices of the experts and the router have a bias, or a list of the matrices with a bias.
            Shared experts have no bias.
    """

    inner: ClassVar[tuple[str, ...]] = ("router_input",)

    kind: Literal["moe"]
    experts: Positive
    top_k: Positive
    shared_experts: Annotated[int, Field(ge=0, le=1024)] = 0
    router: Router = Router.model_construct()
    router_input: WiringText | None = None
    bias: bool | Biases = later(False)

    @property
    def losses(self) -> tuple[str, ...]:
        return (*super().losses, *BALANCE, "z")

    def problems_in(self, shape: Shape) -> Iterator[Problem]:
        yield from super().problems_in(shape)
        if self.top_k > self.experts:
            message = f"`top_k` is {self.top_k}, but `experts` is only {self.experts}"
            related = (("the experts", ("experts",)),)
            yield Problem(("top_k",), "S286", message, f"use at most {self.experts}", related)
        if wrong := next((size for size in (self.width(shape.dim), shape.dim) if size % MULTIPLE), None):
            what = "the width of an expert" if wrong == self.width(shape.dim) else "the width of the model"
            hint = f"choose a multiple of {MULTIPLE}, which the matrix products of experts need on a GPU"
            message = f"{what} is {wrong}, which is not a multiple of {MULTIPLE}"
            yield Problem(("hidden" if self.hidden else "ratio",), "S286", message, hint)
        if self.experts > 2**15:
            yield Problem(
                ("experts",), "S286", f"`experts` is {self.experts:,}, but must be at most 32,768", "use fewer experts"
            )
        if self.router.normalize and self.top_k == 1:
            hint = "remove `normalize`, or set `top_k` to at least 2"
            yield Problem(("router", "normalize"), "S286", SINGLE_EXPERT, hint)
        yield from (problem.under("router") for problem in self._group_problems())

    def _group_problems(self) -> Iterator[Problem]:
        router, size = self.router, self.experts // self.router.groups
        chosen = router.top_groups or router.groups
        if self.experts % router.groups:
            message = f"`groups` is {router.groups}, which does not divide `experts`, {self.experts}"
            yield Problem(("groups",), "S286", message, f"choose a divisor of {self.experts}")
        elif chosen > router.groups:
            message = f"`top_groups` is {chosen}, but `groups` is only {router.groups}"
            yield Problem(("top_groups",), "S286", message, f"use at most {router.groups}")
        elif chosen * size < self.top_k <= self.experts:
            message = (
                f"`top_k` is {self.top_k}, but `top_groups` {chosen} leaves only {counted(chosen * size, 'expert')}"
            )
            yield Problem(("top_groups",), "S286", message, "raise `top_groups`, or lower `top_k`")
        elif router.groups > 1 and router.group_best > size:
            default = "" if "group_best" in router.model_fields_set else " by default"
            message = f"`group_best` is {router.group_best}{default}, but a group has only {counted(size, 'expert')}"
            yield Problem(("group_best",), "S286", message, f"set `group_best` to {size}, or use fewer `groups`")

    def _has_bias(self, name: str) -> bool:
        return self.bias if isinstance(self.bias, bool) else name in self.bias

    def lower(self, b: Builder, x: str, shape: Shape, context: LoweringContext) -> Lowered:
        width = shape.size("W", int(self.width(shape.dim)), "features inside an expert", self.title)
        count = shape.size("N", self.experts, "experts", self.title)
        chosen = shape.size("K", self.top_k, "experts of a token", self.title)
        logits = self._logits(b, x, count, shape, context)
        scores = b.add("scores", SCORES[self.router.score], (logits,))
        bias = (b.param("router_bias", TensorType((count,), "f32"), constant(0.0)),) if self.router.bias else ()
        experts = self._chosen(b, scores, bias, chosen)
        losses, load = self._losses(b, logits, scores, experts, count, context)
        weights = self._weights(b, scores, experts)
        if load and self.router.bias:
            weights = b.add("weights.load", AttachLoad(), (weights, *bias, load))
        order = b.add("order", SortByExpert(count), (experts,))
        place, ends = output_ref(order, 1), output_ref(order, 2)
        rows = b.add("rows", Dispatch(), (x, order, place))

        def product(name: str, read: str = rows, size: tuple[Dim, Dim] = (width, shape.dim)) -> str:
            init = shape.output_init if name == "down" else shape.matrix_init
            weight = b.param(name, shape.activation(count, *size), init)
            product = b.add(name, GroupedLinear(), (read, weight, ends))
            if not self._has_bias(name):
                return product
            vectors = b.param(f"{name}_bias", shape.activation(count, size[0]), constant(0.0))
            added = b.add(f"{name}.bias", OfExperts(), (vectors, experts, order))
            return pointwise(b, f"{name}.biased", "x + bias", x=product, bias=added)

        down = product("down", self.activated(b, product), (shape.dim, width))
        y = b.add("y", Combine(), (down, weights, order, place))
        return Lowered(self._with_shared(b, x, y, shape, context), losses=losses)

    def _logits(self, b: Builder, x: str, count: int, shape: Shape, context: LoweringContext) -> str:
        if self.router_input is not None and context.wire is not None:
            x = context.wire(self.router_input, "router.input", {"router_input": x}, 0)
        if b.types[x].dtype != "f32":
            x = pointwise(b, "router.wide", "x", dtype="f32", x=x)
        weight = b.param("router", TensorType((count, b.types[x].width), "f32"), shape.matrix_init)
        logits = b.add("router", Linear(), (x, weight))
        if not self._has_bias("router"):
            return logits
        bias = b.param("logits_bias", TensorType((count,), "f32"), constant(0.0))
        return pointwise(b, "router.biased", "x + bias", x=logits, bias=bias)

    def _chosen(self, b: Builder, scores: str, bias: Sequence[str], count: int) -> str:
        router = self.router
        if router.top_groups in (None, router.groups):
            return b.add("experts", TopExperts(count, router.bias), (scores, *bias))
        assert router.top_groups is not None
        if bias:
            scores = pointwise(b, "scores.biased", "x + bias", x=scores, bias=bias[0])
        best = BestGroups(router.groups, router.top_groups, router.group_best)
        return b.add("experts", TopExperts(count), (b.add("scores.best", best, (scores,)),))

    def _weights(self, b: Builder, scores: str, experts: str) -> str:
        weights = b.add("weights", ScoresOf(), (scores, experts))
        if self.router.normalize:
            weights = b.add("weights.normalized", ShareOfSum(), (weights,))
        if self.router.scale != 1:
            scale = b.constant("router_scale", self.router.scale, self.router.scale)
            weights = pointwise(b, "weights.scaled", f"w * {scale!r}", w=weights)
        return weights

    def _losses(
        self, b: Builder, logits: str, scores: str, experts: str, count: int, context: LoweringContext
    ) -> tuple[Mapping[str, str], str]:
        """Adds the nodes of the losses that have a weight in training.

        Args:
            b: the builder of the function.
            logits: the router's logits, f32[B, T, N].
            scores: the scores of experts, f32[B, T, N].
            experts: the chosen experts, i64[B, T, K].
            count: the number of experts, N.
            context: the context, whose `weights` select the losses.

        Returns:
            The losses by name, and the load of each expert, f32[B, N]. The load is "" if no node reads the load.
        """
        stated = [name for name in (*BALANCE, "z") if f"{self.title}.{name}" in context.weights]
        losses: dict[str, str] = {}
        balanced = [name for name in stated if name in BALANCE]
        load = ""
        if context.training and (balanced or self.router.bias):
            load = b.add("load", ExpertLoad(count), (experts,))
        if balanced:
            # the sigmoid scores of a token do not add up to 1
            shares = scores if self.router.score == "softmax" else b.add("scores.share", ShareOfSum(), (scores,))
            losses |= {name: b.add(name, BalanceLoss(name != "balance"), (shares, load)) for name in balanced}
        if "z" in stated:
            losses["z"] = b.add("z", MeanSquare(), (b.add("router.lse", LogSumExp(), (logits,)),))
        return losses, load

    def _with_shared(self, b: Builder, x: str, routed: str, shape: Shape, context: LoweringContext) -> str:
        if not self.shared_experts:
            return routed
        outer = b.scope
        b.scope = b.path("shared")
        width = self.shared_experts * self.width(shape.dim)
        mlp = Mlp(kind="mlp", name=f"{self.title}_shared", hidden=width, act=self.act)
        shared = mlp.lower(b, x, shape, context).value
        b.scope = outer
        return pointwise(b, "sum", "routed + shared", routed=routed, shared=shared)
