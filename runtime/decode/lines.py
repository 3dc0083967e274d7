"""Translates source lines into target lines token by token, by greedy decoding or beam search."""

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
CHECK = 4  # the number of steps between two counts of the unfinished rows; each count synchronizes with the device


@dataclass(frozen=True)
class Translator:
    """A decoder for a model that maps source lines to target lines.

    Beam search (`beam` > 1) keeps the `beam` most probable lines of each source, without a length penalty. The search
    for a source stops when its most probable line is finished. Finished sources are removed from the batch. Decoding
    also stops after `window` tokens. A line without a stop token is then returned as it is.

    Attributes:
        steps: the object that runs the programs of the model.
        tokenizer: the character tokenizer of the model.
        window: the maximum length of sources and targets in tokens, including stop tokens.
        fixed: whether sources must be padded to `window` tokens, as for a model that attends to padding.
        device: the device of the model.
        batch: the number of sources per batch.
        beam: the beam size; 1 is greedy decoding.
    """

    steps: Steps
    tokenizer: CharTokenizer
    window: int
    fixed: bool
    device: torch.device
    batch: int = BATCH
    beam: int = 1

    def translate(self, lines: Iterable[str], limits: Sequence[int] | None = None) -> list[str]:
        """Translates source lines into target lines.

        Args:
            lines: the source lines.
            limits: for each line, the number of target tokens that the caller needs, including the stop token. Greedy
                decoding may stop after this number of tokens. None decodes complete targets.

        Returns:
            One target line per source line, in the order of `lines`.

        Raises:
            LineError: if a line is too long, or contains a character that is not in the vocabulary. No line is decoded.
            TypeError: if `lines` is a `str`, or a line is not a `str`.
            ValueError: if the numbers of limits and lines differ.
            RunFailure: if logits are NaN.
        """
        if isinstance(lines, str):
            raise TypeError("translate needs a list of lines, not one text")
        lines = list(lines)
        for i, line in enumerate(lines):
            if not isinstance(line, str):
                raise TypeError(f"line {i} is {type(line).__name__}, not text")
        if limits is not None and len(limits) != len(lines):
            raise ValueError(f"translate needs a limit for each line, not {len(limits)} limits for {len(lines)} lines")
        encoded = torch.from_numpy(self.tokenizer.encode_rows(lines, self.window))
        # Lines are sorted by length, so that the lines of a batch end after similar numbers of steps
        order = sorted(range(len(lines)), key=lambda i: len(lines[i]))
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
        """Decodes sources, i64 [B, S]. Returns targets, i64 [B, window].

        A row of the result has the tokens of a target, then a stop token, then padding. With `limits`, i64 [B], greedy
        decoding may stop row i after `limits[i]` tokens. Raises RunFailure if the largest logit is not finite.
        """
        rows, beam = len(source), self.beam
        state = self.steps.begin(self.steps.encode(source), beam)
        targets = source.new_full((rows, self.window), PAD)
        if limits is None or beam > 1:  # a beam search knows the most probable line only at its end
            limits = source.new_full((rows,), self.window)
        search = _Search.start(limits, beam, self.window)
        for t in range(self.window):
            search = search.extended(self.steps.extend(search.last, t, state), t, state)
            if (t + 1) % CHECK and t + 1 < self.window:
                continue
            if search.broken:  # checked before finished rows are removed, because rows with NaN count as finished
                raise RunFailure("the largest logit is not finite", "the model is broken: try an earlier checkpoint")
            done = search.done(t + 1)
            unfinished = (~done).nonzero()[:, 0]
            if len(unfinished) == 0 or t + 1 == self.window:
                break
            size = self.steps.rows(len(unfinished), search.rows)
            if size < search.rows:
                rows_left = torch.cat((unfinished, done.nonzero()[: size - len(unfinished), 0]))
                targets[search.index] = search.best
                state = self.steps.begin(_select(state, search.beams_of(rows_left)))
                search = search.only(rows_left)
        targets[search.index] = search.best
        return targets


@dataclass(frozen=True)
class _Search:
    """The state of a search. It has the `beam` most probable partial target lines of each of `rows` sources, in
    descending order of probability.

    Attributes:
        index: the row of each source in the batch, i64 [rows].
        limits: the number of tokens of each target that the caller needs, i64 [rows].
        lines: the tokens of the partial lines, i64 [rows, beam, window].
        scores: the log-probabilities of the partial lines, f32 [rows, beam].
        ended: whether each line has a stop token, bool [rows, beam].
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
        """Returns a search with empty lines. All lines of a source are equal at first. Therefore, only the first line
        has a finite score.
        """
        rows, device = len(limits), limits.device
        scores = torch.full((rows, beam), float("-inf"), device=device)
        scores[:, 0] = 0
        lines = torch.full((rows, beam, window), PAD, device=device)
        ended = torch.zeros(rows, beam, dtype=torch.bool, device=device)
        last = torch.full((rows * beam, 1), START, device=device)
        return cls(torch.arange(rows, device=device), limits, lines, scores, ended, last)

    @property
    def rows(self) -> int:
        return len(self.index)

    def done(self, written: int) -> Tensor:
        """Returns whether each source is complete after `written` steps, bool [rows].

        A source is complete if its most probable line has a stop token, or has the number of tokens in `limits`.
        """
        return self.ended[:, 0] | (self.limits <= written)

    @property
    def best(self) -> Tensor:
        return self.lines[:, 0]

    @property
    def broken(self) -> bool:
        return bool(self.scores[:, 0].isnan().any())

    def extended(self, logits: Tensor, t: int, state: State) -> "_Search":
        """Returns the search after its lines are extended by the token at position `t`.

        `logits` are the logits of this token, f32 [rows * beam, V]. The rows of `state`, the state of the model, are
        reordered in place.
        """
        rows, beam = self.scores.shape
        chances = logits.log_softmax(-1).reshape(rows, beam, -1)
        chances = chances.masked_fill(self.ended[..., None], float("-inf"))
        chances[..., PAD] = torch.where(self.ended, 0.0, float("-inf"))  # finished lines continue with padding
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
        beam = self.scores.shape[1]
        return (sources[:, None] * beam + torch.arange(beam, device=sources.device)).flatten()

    def only(self, sources: Tensor) -> "_Search":
        last = self.last[self.beams_of(sources)]
        index, limits, lines = self.index[sources], self.limits[sources], self.lines[sources]
        return _Search(index, limits, lines, self.scores[sources], self.ended[sources], last)


def _select(state: State, rows: Tensor) -> State:
    return {place: tuple(tensor.index_select(0, rows) for tensor in tensors) for place, tensors in state.items()}


def _follow(state: State, rows: Tensor) -> None:
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
    """Returns a decoder for a model. Each call of the decoder uses the current weights of the model.

    Args:
        model: the generated model.
        spec: the spec of the model.
        tokenizer: the character tokenizer of the model.
        device: the device of the model.
        batch: the number of target lines per batch. A batch contains `batch // beam` sources.
        beam: the beam size. None selects greedy decoding.
        compiled: whether every step runs as a CUDA graph on a GPU.

    Returns:
        The decoder.
    """
    steps, beam = Graphed if compiled and device.type == "cuda" else Eager, beam or 1
    batch = max(1, batch // beam)  # each partial line has a separate row in the state of the model
    return Translator(
        steps(line_model(model)), tokenizer, spec.model.window, spec.model.reads_pads, device, batch, beam
    )


def translator_of(opened: OpenedModel, beam: int | None = None, batch: int = BATCH) -> Translator:
    """Returns a decoder for an opened model that maps lines to lines.

    `batch` is the number of target lines per batch. If `beam` is None, the spec gives the beam size. Raises DataError
    for a text model.
    """
    tokenizer = opened.characters
    beam = beam or getattr(opened.spec.eval, "beam", None)
    model = Unchecked(opened.model)  # inputs are valid, and a check would synchronize with the device
    return translator(model, opened.spec, tokenizer, opened.device, batch=batch, beam=beam, compiled=True)


@torch.no_grad()
def decoder_inputs(
    model: nn.Module, source: Tensor, target: Tensor, forcing: Tensor, writes: tuple[str, str] = ("encode", "extend")
) -> Tensor:
    """Computes decoder inputs for scheduled sampling in training: a mix of target tokens and predicted tokens.

    The input at position 0 is the start token. If `forcing[t + 1]` is true, the input at position `t + 1` is the target
    token `t`. Otherwise, the input at position `t + 1` is the most probable token after the inputs up to `t`, except
    padding and start. Prediction continues after a predicted stop token.

    Args:
        model: the generated model.
        source: the source tokens, i64 [B, S].
        target: the target tokens, i64 [B, T].
        forcing: whether the input at each position is a target token, bool [T] or [B, T].
        writes: the names of two programs: one encodes the source, the other extends the target by a token.

    Returns:
        The decoder inputs, i64 [B, T].
    """
    encode, extend = (getattr(model, name) for name in writes)
    forcing = forcing.expand(target.shape)
    state = encode(source)
    inputs = torch.full_like(target, START)
    for t in range(target.shape[1] - 1):
        start = torch.tensor(t, device=target.device)
        predicted = extend(inputs[:, t : t + 1], start, state)[:, STOP:].argmax(-1) + STOP
        inputs[:, t + 1] = torch.where(forcing[:, t + 1], target[:, t], predicted)
    return inputs
