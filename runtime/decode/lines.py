"""Turns lines into lines: encodes sources, and extends targets token by token, greedily or by beam search."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specc.compiler.characters import PAD, START, STOP
from specc.compiler.spec.spec import Spec
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.decode.step_graphs import Eager, Graphed, Steps
from specc.runtime.errors import RunFailure
from specc.runtime.model.guards import Unchecked
from specc.runtime.model.protocols import State, line_model
from specc.runtime.open_model import OpenedModel

BATCH = 4096
CHECK = 4  # steps between two counts of the rows that are not done: each count waits for the device


@dataclass(frozen=True)
class Translator:
    """A model of pairs that decodes.

    Beam search (of `beam` > 1) keeps the most probable unfinished and finished lines of each source and ends when a
    finished one leads: the probability of a line only falls as it grows, and no length is preferred. Rows that are done
    leave the batch. Lines that have not stopped after `window` tokens are given as they are.

    Attributes:
        steps: runs the model's programs.
        window: tokens of the longest source and target, stops included.
        fixed: sources have to be padded to the window, as the model reads pads.
        batch: sources at once.
    """

    steps: Steps
    tokenizer: CharTokenizer
    window: int
    fixed: bool
    device: torch.device
    batch: int = BATCH
    beam: int = 1

    def translate(self, lines: Iterable[str], limits: Sequence[int] | None = None) -> list[str]:
        """Translates lines.

        Args:
            lines: sources.
            limits: one per line, the number of tokens that are needed of its target, stop included; greedy decoding
                may end anywhere behind them. None for whole targets.

        Returns:
            A target per source, in the same order.

        Raises:
            LineError: a line is too long or has a character that the vocabulary lacks; nothing is decoded then.
            TypeError: `lines` is a single text, or a line is not text.
            ValueError: there are more or fewer limits than lines.
            RunFailure: logits are not numbers.
        """
        if isinstance(lines, str):
            raise TypeError("translate takes a list of lines, not one text")
        lines = list(lines)
        for i, line in enumerate(lines):
            if not isinstance(line, str):
                raise TypeError(f"line {i} is {type(line).__name__}, not text")
        if limits is not None and len(limits) != len(lines):
            raise ValueError(f"translate takes a limit for each line: {len(limits)} for {len(lines)} lines")
        encoded = torch.from_numpy(self.tokenizer.encode_rows(lines, self.window))
        order = sorted(range(len(lines)), key=lambda i: len(lines[i]))  # lines of a batch end at about the same step
        targets = [""] * len(lines)
        for start in range(0, len(lines), self.batch):
            rows = order[start : start + self.batch]
            chosen = [lines[i] for i in rows]
            width = self.window if self.fixed else max(map(len, chosen)) + 1
            ids = encoded[rows, :width].to(self.device, torch.int64)
            most = None if limits is None else torch.tensor([limits[i] for i in rows], device=self.device)
            texts = self.tokenizer.decode_rows(self.tokens(ids, most).cpu().numpy())
            for i, text in zip(rows, texts, strict=True):
                targets[i] = text
        return targets

    @torch.no_grad()
    def tokens(self, source: Tensor, limits: Tensor | None = None) -> Tensor:
        """The targets of sources i64 [B, S] as i64 [B, window]: tokens, a stop, pads. Greedy decoding may end after as
        many tokens of a row as `limits`, i64 [B], states."""
        rows, beam = len(source), self.beam
        state = self.steps.begin(self.steps.encode(source), beam)
        targets = source.new_full((rows, self.window), PAD)
        if limits is None or beam > 1:  # which of several lines is the best is known at the end
            limits = source.new_full((rows,), self.window)
        search = _Search.start(limits, beam, self.window)
        for t in range(self.window):
            search = search.extended(self.steps.extend(search.last, t, state), t, state)
            if (t + 1) % CHECK and t + 1 < self.window:
                continue
            if search.broken:  # now: of all NaN the stop's is the maximum, so such rows end, and leave
                raise RunFailure("the largest logit is no number", "the model is broken: try an earlier checkpoint")
            done = search.done(t + 1)
            going = (~done).nonzero()[:, 0]
            if len(going) == 0 or t + 1 == self.window:
                break
            size = self.steps.rows(len(going), search.rows)
            if size < search.rows:
                rows_left = torch.cat((going, done.nonzero()[: size - len(going), 0]))
                targets[search.index] = search.best
                state = self.steps.begin(_select(state, search.beams_of(rows_left)))
                search = search.only(rows_left)
        targets[search.index] = search.best
        return targets


@dataclass(frozen=True)
class _Search:
    """The lines so far of `rows` sources, `beam` of each, best first.

    Attributes:
        index: the row in the batch of each source, i64 [rows].
        limits: tokens that are needed of each target, i64 [rows].
        lines: i64 [rows, beam, window].
        scores: log-probabilities, f32 [rows, beam].
        ended: which lines have their stop, bool [rows, beam].
        last: the next input of the decoder, i64 [rows * beam, 1].
    """

    index: Tensor
    limits: Tensor
    lines: Tensor
    scores: Tensor
    ended: Tensor
    last: Tensor

    @classmethod
    def start(cls, limits: Tensor, beam: int, window: int) -> "_Search":
        """Nothing written; only the first beam counts, as all are the same."""
        rows, device = len(limits), limits.device
        scores = torch.full((rows, beam), float("-inf"), device=device)
        scores[:, 0] = 0
        return cls(
            torch.arange(rows, device=device),
            limits,
            torch.full((rows, beam, window), PAD, device=device),
            scores,
            torch.zeros(rows, beam, dtype=torch.bool, device=device),
            torch.full((rows * beam, 1), START, device=device),
        )

    @property
    def rows(self) -> int:
        return len(self.index)

    def done(self, written: int) -> Tensor:
        """bool [rows]: the best line has ended, and no other can pass it; or enough is written."""
        return self.ended[:, 0] | (self.limits <= written)

    @property
    def best(self) -> Tensor:
        """i64 [rows, window]."""
        return self.lines[:, 0]

    @property
    def broken(self) -> bool:
        return bool(self.scores[:, 0].isnan().any())

    def extended(self, logits: Tensor, t: int, state: State) -> "_Search":
        """One token more, from `logits` f32 [rows * beam, V]; the rows of `state` follow their lines."""
        rows, beam = self.scores.shape
        chances = logits.log_softmax(-1).reshape(rows, beam, -1)
        chances = chances.masked_fill(self.ended[..., None], float("-inf"))
        chances[..., PAD] = torch.where(self.ended, 0.0, float("-inf"))  # a line that has ended goes on at no cost
        chances[..., START] = float("-inf")
        totals = (self.scores[..., None] + chances).flatten(1)
        scores, chosen = totals.topk(beam, dim=1) if beam > 1 else totals.max(1, keepdim=True)
        parents, tokens = chosen // logits.shape[-1], chosen % logits.shape[-1]
        lines, ended = self.lines, self.ended
        if beam > 1:
            lines = lines.gather(1, parents[..., None].expand_as(lines))
            ended = ended.gather(1, parents)
            follow = (parents + beam * torch.arange(rows, device=parents.device)[:, None]).flatten()
            _follow(state, follow)
        lines[..., t] = tokens
        return _Search(self.index, self.limits, lines, scores, ended | (tokens == STOP), tokens.reshape(-1, 1))

    def beams_of(self, sources: Tensor) -> Tensor:
        """The rows of the state that belong to these sources."""
        beam = self.scores.shape[1]
        return (sources[:, None] * beam + torch.arange(beam, device=sources.device)).flatten()

    def only(self, sources: Tensor) -> "_Search":
        """The search of these sources alone."""
        last = self.last[self.beams_of(sources)]
        index, limits, lines = self.index[sources], self.limits[sources], self.lines[sources]
        return _Search(index, limits, lines, self.scores[sources], self.ended[sources], last)


def _select(state: State, rows: Tensor) -> State:
    """Some rows of a state, copied."""
    return {place: tuple(tensor.index_select(0, rows) for tensor in tensors) for place, tensors in state.items()}


def _follow(state: State, rows: Tensor) -> None:
    """Replaces the rows of a state, in place."""
    for tensors in state.values():
        for tensor in tensors:
            tensor.copy_(tensor.index_select(0, rows))


def translator(
    model: nn.Module | Unchecked,
    spec: Spec,
    tokenizer: CharTokenizer,
    device: torch.device,
    *,
    batch: int = BATCH,
    beam: int | None = None,
    compiled: bool = False,
) -> Translator:
    """Decodes with `model` as its weights are at each call, greedily where `beam` is None. On a GPU, `compiled` runs
    every step as a CUDA graph."""
    steps, beam = Graphed if compiled and device.type == "cuda" else Eager, beam or 1
    batch = max(1, batch // beam)  # each beam has its state
    return Translator(
        steps(line_model(model)), tokenizer, spec.model.window, spec.model.reads_pads, device, batch, beam
    )


def translator_of(opened: OpenedModel, beam: int | None = None, batch: int = BATCH) -> Translator:
    """That of an opened model of pairs, with the beam that its spec is scored with where none is given. Raises
    DataError for a model of text."""
    tokenizer = opened.characters
    beam = beam or getattr(opened.spec.eval, "beam", None)
    model = Unchecked(opened.model)  # its inputs need no check, which would wait for the device
    return translator(model, opened.spec, tokenizer, opened.device, batch=batch, beam=beam, compiled=True)


@torch.no_grad()
def fed(
    model: nn.Module, source: Tensor, target: Tensor, forcing: Tensor, writes: tuple[str, str] = ("encode", "extend")
) -> Tensor:
    """What the decoder is fed where not every token is the truth: i64 [B, T].

    Position 0 is the start. Position t + 1 is the target's token t where `forcing`, bool [T] or [B, T], is true at
    t + 1, else what a decoder would write after the positions up to t: the most probable token but pad and start; where
    it stopped it goes on, as the target does. `source` is i64 [B, S], `target` i64 [B, T]; `writes` are the programs
    that it writes by, for the source and for a token.
    """
    encode, extend = (getattr(model, name) for name in writes)
    forcing = forcing.expand(target.shape)
    state = encode(source)
    inputs = torch.full_like(target, START)
    for t in range(target.shape[1] - 1):
        start = torch.tensor(t, device=target.device)
        own = extend(inputs[:, t : t + 1], start, state)[:, STOP:].argmax(-1) + STOP
        inputs[:, t + 1] = torch.where(forcing[:, t + 1], target[:, t], own)
    return inputs
