"""One side of an encoder-decoder: its stages in order, over whole sequences or against a state."""

from collections.abc import Mapping

from specc.compiler.architectures.circuit import STREAM, Circuit
from specc.compiler.architectures.scope import Scope
from specc.compiler.architectures.stages import Stages
from specc.compiler.architectures.time_loop import Loop
from specc.compiler.blocks.context import LoweringContext
from specc.compiler.blocks.wiring import IDS
from specc.compiler.ir.builder import Builder
from specc.compiler.ops.sequence import StateWrite


class Side(Stages):
    """One side of an encoder-decoder."""

    def run(self, b: Builder, context: LoweringContext) -> tuple[str, dict[str, str]]:
        """Adds the stages over the tokens of the context.

        Args:
            b: the builder of the program.
            context: the values that the stages can read. If it `extends` a sequence, `context.cache` is the previous
                state, by side, stage and key.

        Returns:
            The output of the last stage, and the state after the last token, by side, stage and key.

        Raises:
            LoweringError: if a stage does not fit the number of features of its input.
        """
        learned = Circuit(layers=self.stages).learned
        scope = Scope(b, self.shape, {STREAM: ""}, learned, common={IDS: context.ids}, at=self.name)
        scope.shape_of = self.shape_of_learned
        state: dict[str, str] = {}
        for loop, stages in self.groups():
            if loop:
                new: Mapping[str, str] = Loop(self, loop, stages).add(scope, context)
            else:
                inside = self.inside(stages[0], context)
                new = self.add(scope, stages[0], self.input(scope, stages[0], inside), inside)
            recurrent = (
                self.state([stage for stage in stages if "recurrent" in stage.traits]) if context.extends else {}
            )
            b.scope = ""
            for key, ref in new.items():
                state[key] = ref
                if key in recurrent:
                    state[key] = b.add(f"{key}.state", StateWrite(), (context.cache[key], ref))
        return scope.value, state
