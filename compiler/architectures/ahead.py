"""Modules that predict later tokens from the output of the last block. Only training programs contain these modules."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from specc.compiler.architectures.block import Block
from specc.compiler.architectures.circuit import STREAM
from specc.compiler.architectures.stack import BlockCall, Stack
from specc.compiler.blocks.context import LoweringContext, Shape
from specc.compiler.blocks.head import LogitHead
from specc.compiler.blocks.norm import Rms
from specc.compiler.blocks.parts import Norm
from specc.compiler.ir.builder import Builder
from specc.compiler.losses.module_ahead import ModuleAhead
from specc.compiler.ops.linear import Linear
from specc.compiler.ops.loss import CrossEntropy, LaterTargets
from specc.compiler.ops.pointwise import pointwise
from specc.compiler.ops.sequence import Concat
from specc.compiler.ops.shape import Embedding
from specc.compiler.programs.programs import LoweringError
from specc.compiler.strict import Problem


class Modules(NamedTuple):
    """Lowers the modules that one loss term adds to predict later tokens.

    Attributes:
        term: the loss term.
        place: the index of the term in `train.losses`.
        stack: the blocks of the model. Each module has the structure of the last block.
        norm: the norm after the last block.
        head: the head of the model, which all modules use.
    """

    term: ModuleAhead
    place: int
    stack: Stack
    norm: Norm | None
    head: LogitHead

    @property
    def block(self) -> Block:
        return self.stack.blocks.every[-1]

    def lower(
        self, b: Builder, x: str, targets: str, scored: str, context: LoweringContext, loss: str, ignore: int | None
    ) -> str:
        """Adds the modules to the training program. Returns the loss of the model plus the weighted mean loss of the
        modules, f32[].

        Args:
            b: The builder of the training program.
            x: The residual stream after the last block, [B, T, D].
            targets: The next token of each token, i64[B, T]. The modules read the embeddings of these tokens.
            scored: The targets of the loss, i64[B, T]: `targets`, with `ignore` where the loss ignores a target.
            context: The values that blocks can read.
            loss: The loss without the modules, f32[].
            ignore: The target id that the loss ignores.
        """
        losses, stream = dict[str, str](), x
        for k in range(1, self.term.modules + 1):
            stream = self._module(b, k, x if self.term.form == "heads" else stream, targets, context)
            b.scope = f"ahead{k}"
            y = self._normed(b, stream, "norm")
            head = self.head.model_copy(update={"tied": True})
            logits = head.lower(b, y, self.shape, "@embed.token" if self.head.tied else "@head.logits")
            later = b.add("targets", LaterTargets(k, self.term.bos, ignore), (scored,))
            op = CrossEntropy("mean", ignore, f"nats_{k + 1}", (), (str(k + 1),))
            losses[f"ahead{k}"] = b.add("loss", op, (logits, scored, later))
        b.scope = ""
        text = f"loss + weight * ({' + '.join(losses)}) / {len(losses)}"
        return pointwise(b, "loss_ahead", text, loss=loss, weight=self.term.input, **losses)

    @property
    def shape(self) -> Shape:
        return self.stack.shape

    def _normed(self, b: Builder, x: str, name: str) -> str:
        norm = self.norm or Rms(kind="rms")
        return norm.of_no_layer.lower(b, x, name, self.shape, name)

    def _module(self, b: Builder, k: int, x: str, targets: str, context: LoweringContext) -> str:
        shape, b.scope = self.shape, f"ahead{k}"
        if self.term.form == "sequential":
            ids = targets if k == 1 else b.add("ids", LaterTargets(k - 1, fill=0), (targets,))
            token = b.add("token", Embedding(), (ids, "@embed.token"))
            both = b.add("both", Concat(), (self._normed(b, x, "stream_norm"), self._normed(b, token, "token_norm")))
            size = shape.activation(shape.dim, 2 * shape.dim)
            x = b.add("project", Linear(), (both, b.param("project", size, shape.matrix_init)))
        b.origins.setdefault(STREAM, "")
        call = BlockCall(self.stack, b, self.stack.blocks.count - 1, (STREAM,), context)
        scope, _ = call.body(b, x, context, at=f"ahead{k}")
        if b.scalars:
            message = (
                "the modules of `module_ahead` are copies of the last block and have no layer number, but a formula of "
                "this block reads `layer`"
            )
            hint = "write the last block without `layer`, or use `later_token`"
            raise LoweringError((Problem(("train", "losses", self.place), "S265", message, hint),))
        return scope.joined()


def module_problems(block: Block, common: Collection[str], head: LogitHead, same_width: bool) -> Iterator[str]:
    """Yields the reasons why modules that predict later tokens cannot have the structure of the model's last block.

    Args:
        block: The last block.
        common: The names of the values that all blocks share.
        head: The head of the model.
        same_width: Whether the token table has the same number of features as the model.
    """
    if block.circuit.earlier:
        yield "they repeat the last block, which calls `output(...)` or `value(...)`"
    if block.circuit.streams_after((STREAM,)) != (STREAM,) or isinstance(block.read, dict):
        yield "they repeat the last block, which reads or writes several streams"
    if any(name in ("x0", "ids", *common) for name in block.circuit.reads):
        yield "they repeat the last block, which reads `x0`, `ids` or a value of `common`"
    if head.bias:
        yield "they use the head, which has a `bias`"
    if not same_width:
        yield "they read the token table, whose width is not the `dim` of the model"
