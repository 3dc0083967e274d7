"""Classifies attention heads by the tokens to which they attend.

The attention probabilities come from the reference implementation of the attention op. This module therefore contains
no code for specific architectures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.compiler.ir.graph import Graph, Node
from specc.compiler.ops.attention import Attention

PREVIOUS, FIRST, INDUCTION, CONTENT, MIXED = "previous token", "first token", "induction", "content", "mixed"
THRESHOLD = 0.4  # the minimum score for the types `previous`, `first`, `induction` and `content`
# The index of the first query that is measured. The previous token of query 1 is also the first token.
FROM = 2


@dataclass(frozen=True, slots=True)
class Head:
    """The tokens to which an attention head attends. All numbers are from 0 to 1.

    Attributes:
        layer: the attention node, such as `blocks.0.attention.y`.
        head: the index of the head.
        previous: the mean attention to the token before the query.
        first: the mean attention to the first token of the window.
        induction: the score "prefix matching" of Olsson et al. (2022, "In-context Learning and Induction Heads").
            The input is a random sequence of tokens, followed by its repetition. The score is the mean attention from
            a token of the repetition to the token after the first occurrence of the query token. None if the score was
            not measured.
        content: the mean total variation distance between the attention in two texts, at equal positions. The distance
            is 0 if the attention depends only on positions. None if only one text was measured.
    """

    layer: str
    head: int
    previous: float
    first: float
    induction: float | None
    content: float | None

    @property
    def type(self) -> str:
        """The pattern to which the head attends.

        The result is the pattern with the largest of the scores `previous`, `first` and `induction`, if this score is
        at least `THRESHOLD`. Otherwise, the result is `CONTENT` if `content` is at least `THRESHOLD`, and `MIXED` if
        not.
        """
        scores = {PREVIOUS: self.previous, FIRST: self.first, INDUCTION: self.induction or 0.0}
        best = max(scores, key=lambda name: scores[name])
        if scores[best] >= THRESHOLD:
            return best
        return CONTENT if (self.content or 0.0) >= THRESHOLD else MIXED


@dataclass(slots=True)
class _Sums:
    """Accumulates the scores of one attention node over batches. Each score has a sum f64 [heads] and a count."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, values: Tensor) -> None:
        total = values.double().sum((0, 2)).cpu()
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.counts[name] = self.counts.get(name, 0) + values.shape[0] * values.shape[2]

    def mean(self, name: str) -> list[float] | None:
        return (self.sums[name] / self.counts[name]).tolist() if self.counts.get(name) else None


class HeadPatterns:
    """Accumulates the attention scores of all heads of a program.

    `reference.run` runs the program node by node. After each node, it calls the method `observe` or `observe_repeated`.

    Args:
        graph: the program, with all functions inlined.

    Attributes:
        refused: the reason for each attention node that cannot be classified, by node.
    """

    def __init__(self, graph: Graph) -> None:
        self._layers: dict[str, _Sums] = {}
        self.refused: dict[str, str] = {}
        self._lengths = {
            node.name: tuple(graph.types[ref].shape[1] for ref in node.inputs[:2])
            for node in graph.nodes
            if isinstance(node.op, Attention)
        }
        for node in graph.nodes:
            if "attention" in node.op.name and not isinstance(node.op, Attention):
                self.refused[node.name] = f"it is {node.op.name}, which has no scores of pairs of tokens"

    def observe(self, node: Node, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Adds the attention scores of a node, if the rows of the input are texts."""
        weights = self._weights(node, inputs)
        if weights is None or weights.shape[2] <= FROM:
            return
        sums = self._layers.setdefault(node.name, _Sums())
        sums.add("previous", weights.diagonal(offset=-1, dim1=-2, dim2=-1)[..., FROM - 1 :])
        sums.add("first", weights[..., FROM:, 0])
        if pairs := len(weights) // 2:
            even, odd = weights[: 2 * pairs : 2, :, FROM:], weights[1 : 2 * pairs : 2, :, FROM:]
            sums.add("content", (even - odd).abs().sum(-1) / 2)

    def observe_repeated(self, node: Node, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Adds the induction score of a node, if each row of the input is a random sequence and its repetition."""
        weights = self._weights(node, inputs)
        if weights is not None:
            length = weights.shape[2] // 2
            after_earlier = weights.diagonal(offset=1 - length, dim1=-2, dim2=-1)[..., 1:]
            self._layers.setdefault(node.name, _Sums()).add("induction", after_earlier)

    def _weights(self, node: Node, inputs: Sequence[Tensor]) -> Tensor | None:
        if not isinstance(node.op, Attention) or node.name in self.refused:
            return None
        queries, keys = self._lengths.get(node.name, (None, None))
        scores, blind = node.op.logits(*inputs)
        weights = scores.softmax(-1).masked_fill(blind, 0.0)[..., : inputs[1].shape[1]]
        if queries != keys or weights.shape[-1] != weights.shape[-2]:
            other = "another sequence" if queries != keys else "keys that are not single tokens"
            self.refused[node.name] = f"it attends to {other}"
            return None
        return weights

    def heads(self) -> tuple[Head, ...]:
        heads = []
        for layer, sums in self._layers.items():
            previous, first = sums.mean("previous"), sums.mean("first")
            induction, content = sums.mean("induction"), sums.mean("content")
            for i in range(len(previous or ())):
                assert previous is not None and first is not None
                more = (None if scores is None else scores[i] for scores in (induction, content))
                heads.append(Head(layer, i, previous[i], first[i], *more))
        return tuple(heads)


def repeated_tokens(rows: int, length: int, vocabulary: int, seed: int = 0) -> Tensor:
    """Returns rows of random tokens i64 [rows, 2 * length]. The second half of each row equals the first half.

    If the vocabulary is large enough, the tokens in the first half are distinct. The last id of the vocabulary does not
    occur, because it often separates documents.

    Args:
        rows: the number of rows.
        length: the number of tokens in half a row.
        vocabulary: the number of ids.
        seed: the seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    count = max(vocabulary - 1, 1)
    if count >= length:
        part = torch.stack([torch.randperm(count, generator=generator)[:length] for _ in range(rows)])
    else:
        part = torch.randint(count, (rows, length), generator=generator)
    return torch.cat((part, part), 1)
