"""Decodes texts of different lengths, which join and leave a batch, from a KV cache in pages.

On a GPU, each step is a CUDA graph.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.compiler.pipeline import lower
from specc.compiler.programs.programs import LoweringError
from specc.compiler.spec.spec import Spec
from specc.runtime.decode.sampling import Sampling, generator_of
from specc.runtime.decode.text import PAGE, SHORTEST, STRIDES, Decoder, Step, StepFunction
from specc.runtime.errors import RunFailure
from specc.runtime.model.protocols import Cache, GeneratedPages, GeneratedText, paged_model, text_model


def in_pages(spec: Spec) -> Spec:
    """Returns the spec with a cache in pages. A page has 64 positions unless the spec states another size. The dtype
    of the cache does not change.

    Raises RunFailure if the model has a state between tokens that pages cannot hold.
    """
    if page_of(spec) or "cache" not in type(spec.model).model_fields:
        return spec
    paged = with_cache(spec, page=64)
    try:
        lower(paged.plain, "cpu")
    except LoweringError as error:
        raise RunFailure(f"{spec.name} cannot decode texts of different lengths: {error}", "give one prompt") from None
    return paged


def with_cache(spec: Spec, **settings: object) -> Spec:
    """Returns the spec of a decoder with other settings of its cache."""
    from specc.compiler.architectures.decoder import CacheSpec

    cache = getattr(spec.model, "cache", None) or CacheSpec(page=None)
    changed = cache.model_copy(update=settings)
    plain = changed == CacheSpec(page=None)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"cache": None if plain else changed})})


def page_of(spec: Spec) -> int:
    """Returns the number of positions of a page; 0 if the cache is not in pages."""
    cache = getattr(spec.model, "cache", None)
    return 0 if cache is None else cache.page or 0


@dataclass
class _Text:
    """A text in the cache: its tokens since the start of the cache, and its pages."""

    tokens: list[int]
    pages: list[int]


class PagedDecoder:
    """Computes next-token logits for texts that grow, join and leave.

    When a text joins, it receives all pages that `most` tokens need, so that no text ever waits for a page. When a text
    has `window` tokens, its last `window // 2` tokens are read again as the start of a text, as in `Decoder`.

    A step reads the same number of pages of each text. This is the number for the longest text, rounded up to one of a
    few numbers. The number of rows is the number of texts, rounded up to a power of two. On a GPU there is one CUDA
    graph per pair of these numbers. Rows without a text use a separate page.

    Args:
        model: the model, on `device`.
        window: the number of tokens of a full text.
        page: the number of positions of a page.
        pages: the number of pages.
        device: the device of the model.
        step: appends a token to each text. The default is `model.step`.
    """

    def __init__(
        self,
        model: GeneratedPages,
        window: int,
        page: int,
        pages: int,
        device: torch.device,
        step: StepFunction | None = None,
    ) -> None:
        self._model, self._window, self._page, self._device = model, window, page, device
        self._step = step or model.step
        self._cache = model.new_cache(pages + 1)
        self._free, self._spare = list(range(pages)), pages
        self._texts: dict[int, _Text] = {}
        self._most = self.pages_of(window)
        self._stride = max(-(-SHORTEST // page), -(-self._most // STRIDES))
        self._steps: dict[torch.Size, Step] = {}
        self.rounds = device.type == "cuda"  # whether the number of rows is rounded up, for few graphs

    @property
    def preparing(self) -> float:
        """Seconds spent in the uncaptured steps and in capturing CUDA graphs."""
        return sum(step.preparing for step in self._steps.values())

    def pages_of(self, most: int) -> int:
        """Returns the number of pages of a text of at most `most` tokens."""
        return -(-min(most, self._window) // self._page)

    def fits(self, most: int) -> bool:
        """Returns whether a text of at most `most` tokens can join now."""
        return self.pages_of(most) <= len(self._free)

    @torch.no_grad()
    def join(self, texts: Mapping[int, Sequence[int]], most: int) -> Tensor:
        """Adds texts of one length, and returns the logits after each, f32 [R, vocabulary].

        Args:
            texts: the tokens of each text, by a key that no other text has.
            most: the maximum number of tokens of each text before it leaves.

        Raises:
            RunFailure: there are not enough free pages.
        """
        if len(texts) * self.pages_of(most) > len(self._free):
            message = f"{len(texts)} texts of {most} tokens do not fit into {len(self._free)} free pages"
            raise RunFailure(message, "decode fewer texts at once")
        for key, tokens in texts.items():
            self._texts[key] = _Text(list(tokens), [self._free.pop() for _ in range(self.pages_of(most))])
        return self._begin([self._texts[key] for key in texts])

    @torch.no_grad()
    def append(self, tokens: Mapping[int, int]) -> Tensor:
        """Appends one token to each given text, and returns the logits, f32 [R, vocabulary], in the same order."""
        logits: dict[int, Tensor] = {}
        for key, token in tokens.items():
            text = self._texts[key]
            if len(text.tokens) == self._window:
                text.tokens = [*text.tokens[self._window - self._window // 2 :], token]
                logits[key] = self._begin([text])[0]
            else:
                text.tokens.append(token)
        others = [key for key in tokens if key not in logits]
        if others:
            logits |= zip(others, self._extend([self._texts[key] for key in others]), strict=False)
        return torch.stack([logits[key] for key in tokens])

    def leave(self, key: int) -> None:
        """Removes a text, and frees its pages."""
        self._free += self._texts.pop(key).pages

    def _begin(self, texts: Sequence[_Text]) -> Tensor:
        """Runs the model on all tokens of texts of one length."""
        reach = self.pages_of(len(texts[0].tokens))
        ids, starts, table = self._tensors([(text.tokens, 0, text.pages[:reach]) for text in texts])
        return self._model.step(ids, starts, table, self._cache)

    def _extend(self, texts: Sequence[_Text]) -> Tensor:
        """Runs the model on the last token of each text. Returns logits of at least as many rows, valid until the next
        call."""
        reach = max(self.pages_of(len(text.tokens)) for text in texts)
        reach = min(-(-reach // self._stride) * self._stride, self._most)
        rows = [(text.tokens[-1:], len(text.tokens) - 1, self._table(text.pages, reach)) for text in texts]
        count = 1 << (len(rows) - 1).bit_length() if self.rounds else len(rows)
        rows += [([0], 0, self._table([], reach))] * (count - len(rows))
        ids, starts, table = self._tensors(rows)
        if table.shape not in self._steps:
            self._steps[table.shape] = Step(self._step, self._cache)
        return self._steps[table.shape](ids, starts, table)

    def _table(self, pages: Sequence[int], reach: int) -> list[int]:
        return [*pages[:reach], *[self._spare] * (reach - len(pages))]

    def _tensors(self, rows: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> tuple[Tensor, ...]:
        """Returns ids i64 [R, K], starts i64 [R] and the table i64 [R, N]. Each of `rows` is (ids, start, pages)."""
        return tuple(torch.tensor(column, device=self._device) for column in zip(*rows, strict=True))


class PagedTexts(Decoder):
    """A `Decoder` of a model whose cache is in pages, for a batch of texts of equal length.

    Args:
        model: the model, on `device`.
        window: the number of tokens of a full text.
        page: the number of positions of a page.
        device: the device of the model.
        rows: the number of texts.
        step: appends a token to each text. The default is `model.step`.
    """

    def __init__(
        self,
        model: GeneratedPages,
        window: int,
        page: int,
        device: torch.device,
        rows: int = 1,
        step: StepFunction | None = None,
    ) -> None:
        self._page, most = page, -(-window // page)
        self._pages = torch.arange(rows * most, device=device).view(rows, most)
        texts = _RowsOfPages(model, rows * most, model.step)
        super().__init__(texts, window, device, rows, _RowsOfPages(model, 0, step).decode if step else None)

    def _up_to(self, positions: int) -> Cache:
        """Returns the pages, and the table of those up to `positions`."""
        return [*self._cache, (self._pages[:, : -(-positions // self._page)].contiguous(),)]


class _RowsOfPages:
    """An adapter of a model whose cache is in pages. It has the programs of a model whose cache has one row per text.
    The last entry of its cache is the table of pages."""

    def __init__(self, model: GeneratedPages, pages: int, step: StepFunction) -> None:
        self._model, self._pages, self._step = model, pages, step

    def prefill(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        *pages, (table,) = cache
        return self._step(ids, start.repeat(len(ids)), table, pages)

    decode = prefill

    def new_cache(self, rows: int, positions: int) -> Cache:
        return self._model.new_cache(self._pages)


def decoder_of(
    model: GeneratedText | GeneratedPages,
    window: int,
    device: torch.device,
    rows: int = 1,
    step: StepFunction | None = None,
) -> Decoder:
    """Returns a decoder for texts of equal length, in the layout of the model's cache.

    Args:
        model: the model, on `device`.
        window: the number of tokens of a full text.
        device: the device of the model.
        rows: the number of texts.
        step: appends a token to each text. The default is the program of the model.
    """
    if not hasattr(model, "step"):
        return Decoder(text_model(model), window, device, rows, step)
    pages = paged_model(model)
    page = next(tensor.shape[1] for layer in pages.new_cache(0) for tensor in layer)
    return PagedTexts(pages, window, page, device, rows, step)


@dataclass
class _Writing:
    """A text that is being generated: its prompt, its random numbers, and the number of generated tokens."""

    prompt: Sequence[int]
    generator: torch.Generator
    written: int = 0
    numbers: deque[float] = field(default_factory=deque)

    def number(self, count: int) -> float:
        """Returns the next random number, from the same stream as in `sample_tokens`. `count` tokens are generated."""
        if not self.numbers:
            many = min(PAGE, count - self.written)
            self.numbers.extend(torch.rand(many, dtype=torch.float64, generator=self.generator).tolist())
        return self.numbers.popleft()


def sample_texts(
    decoder: PagedDecoder,
    prompts: Sequence[Sequence[int]],
    vocab: int,
    sampling: Sampling,
    seeds: Sequence[int],
    count: int,
    batch: int,
    last: int | None = None,
) -> Iterator[tuple[int, int, bool]]:
    """Yields the sampled tokens of many texts. As a text ends, the next prompt takes its place (continuous batching; Yu
    et al., 2022, "Orca").

    Args:
        decoder: the decoder of the model.
        prompts: the tokens of each prompt.
        vocab: number of logits to use, from id 0.
        sampling: the sampling settings.
        seeds: a seed per prompt. The random numbers of a text depend only on its seed.
        count: the maximum number of tokens to sample for a text.
        batch: the maximum number of texts at once.
        last: a token that ends a text. It is yielded too.

    Yields:
        The index of the prompt, a token, and whether it is the last of its text. The token is -1 if the largest logit
        is not finite.

    Raises:
        SamplingError: a seed has more than 64 bits.
        RunFailure: a text needs more pages than the decoder has.
    """
    waiting = deque(range(len(prompts) if count else 0))
    writing: dict[int, _Writing] = {}
    sampled: dict[int, int] = {}
    while waiting or writing:
        logits: dict[int, Tensor] = {}
        if sampled:
            logits |= zip(sampled, decoder.append(sampled), strict=True)
        while waiting and len(writing) < batch:
            prompt = prompts[index := waiting[0]]
            if not decoder.fits(len(prompt) + count) and writing:
                break  # wait until another text leaves
            logits[index] = decoder.join({index: prompt}, len(prompt) + count)[0]
            writing[index] = _Writing(prompt, generator_of(seeds[index]))
            waiting.popleft()
        rows = torch.stack(list(logits.values()))[:, :vocab]
        uniform = torch.tensor([writing[index].number(count) for index in logits], dtype=torch.float64)
        tokens = sampling.sample(rows, uniform.to(rows.device)).tolist()
        sampled = {}
        for index, token in zip(logits, tokens, strict=True):
            writing[index].written += 1
            ends = token in (-1, last) or writing[index].written == count
            yield index, token, ends
            if ends:
                decoder.leave(index)
                del writing[index]
            else:
                sampled[index] = token


def pages_for(lengths: Sequence[int], page: int, window: int, batch: int) -> int:
    """Returns the number of pages that suffice for any `batch` texts at once.

    Args:
        lengths: the number of tokens of each text at its end.
        page: the number of positions of a page.
        window: the number of tokens of a full text.
        batch: the number of texts at once.
    """
    return sum(sorted((-(-min(length, window) // page) for length in lengths), reverse=True)[:batch])
