"""Decodes texts of different lengths from a paged KV cache. Texts can be added and removed between steps.

On a GPU, each step is a CUDA graph.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specc.compiler.pipeline import lower
from specc.compiler.programs.programs import LoweringError
from specc.compiler.spec.spec import Spec
from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import BLOCK, SHORTEST, STRIDES, Decoder, Replayed, StepFunction
from specc.runtime.errors import RunFailure
from specc.runtime.model.protocols import Cache, GeneratedPages, GeneratedText, paged_model, text_model


def in_pages(spec: Spec) -> Spec:
    """Returns a copy of the spec with a paged cache. A page has 64 positions, unless the spec states another size.

    Raises RunFailure if the state that the model keeps between tokens cannot be stored in pages.
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
    """Returns a copy of the spec of a text model, with the given settings of the cache."""
    from specc.compiler.architectures.decoder import CacheSpec

    cache = getattr(spec.model, "cache", None) or CacheSpec(page=None)
    changed = cache.model_copy(update=settings)
    plain = changed == CacheSpec(page=None)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"cache": None if plain else changed})})


def page_of(spec: Spec) -> int:
    """Returns the number of positions in a page of the cache; 0 if the cache is not paged."""
    cache = getattr(spec.model, "cache", None)
    return 0 if cache is None else cache.page or 0


@dataclass
class _Text:
    """A text whose keys and values are in pages of the cache.

    `pages` has the indices of the pages of the text. `pieces` are i64 tensors on the device. Their concatenation has
    all tokens of the text that the model still attends to. The pages have the keys of all these tokens except the last
    token. `length` is the number of tokens in the pages.
    """

    pages: list[int]
    pieces: list[Tensor]
    length: int = 0


class PagedDecoder:
    """Samples tokens for growing texts of different lengths. Texts can join and leave between steps. The host does not
    wait for the device.

    A new text receives pages for its maximum number of tokens, so that no text ever waits for a page. When a text has
    `window` tokens, the decoder prefills its last `window // 2` tokens again, as the start of a text.

    A step reads the same number of pages for each text: the number that the longest text needs, rounded up. On a GPU,
    the number of rows of a step is the number of texts, rounded up to a power of two. Each combination of the number of
    pages and the number of rows has its own CUDA graph. Rows without a text use a spare page. Positions beyond the last
    page of a text also use the spare page.

    Args:
        model: the model, on `device`.
        window: the number of tokens at which a text is full.
        page: the number of positions of a page.
        pages: the number of pages in the cache.
        device: the device of the model.
        step: a function that appends a token to each text. None selects `model.step`.
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
        self._rows: dict[tuple[int, int, Sampling, int], _Rows] = {}
        self.rounds = device.type == "cuda"  # whether the number of rows is rounded up, to limit the number of graphs

    @property
    def preparing(self) -> float:
        return sum(rows.replayed.preparing for rows in self._rows.values())

    def pages_of(self, most: int) -> int:
        return -(-min(most, self._window) // self._page)

    def fits(self, most: int) -> bool:
        return self.pages_of(most) <= len(self._free)

    def join(self, key: int, tokens: Sequence[int], most: int) -> None:
        """Adds a text of at least one token. Call `begin` for the text before you call `write`.

        Args:
            key: a key that no other text of the decoder has.
            tokens: the tokens of the text, at most `window`.
            most: the maximum number of tokens that the text will have.

        Raises:
            RunFailure: if there are not enough free pages.
        """
        if not self.fits(most):
            message = f"a text of {most} tokens does not fit into {len(self._free)} free pages"
            raise RunFailure(message, "decode fewer texts at once")
        pages = [self._free.pop() for _ in range(self.pages_of(most))]
        self._texts[key] = _Text(pages, [self._sent(torch.tensor(tokens))])

    def leave(self, key: int) -> None:
        self._free += self._texts.pop(key).pages

    def begins(self, key: int) -> bool:
        """Returns whether `begin` must sample the next token of a text, instead of `write`. This is the case if the
        text was just added, or has `window` tokens.
        """
        return self._texts[key].length in (0, self._window)

    def room(self, keys: Iterable[int]) -> int:
        """Returns the number of tokens that can be appended to each text before one of the texts has `window`
        tokens.
        """
        return min(self._window - self._texts[key].length for key in keys)

    @torch.no_grad()
    def begin(self, keys: Sequence[int], sampling: Sampling, vocab: int, uniform: Tensor) -> Tensor:
        """Prefills texts, and samples the next token of each text. Each text was just added, or has `window` tokens.

        Args:
            keys: the keys of the texts.
            sampling: the sampling settings.
            vocab: the number of logits to use, from id 0.
            uniform: random numbers in [0, 1), f64 [texts] on the host.

        Returns:
            The sampled tokens, i64 [texts, 1] on the device. A token is -1 if the largest logit is not finite.
        """
        logits = []
        for text in (self._texts[key] for key in keys):
            ids = torch.cat(text.pieces)
            if text.length:
                ids = ids[self._window - self._window // 2 :].clamp(min=0)
            text.pieces, text.length = [ids], len(ids)
            start, table = ids.new_zeros(1), self._sent(torch.tensor([text.pages[: self.pages_of(len(ids))]]))
            logits.append(self._model.step(ids[None], start, table, self._cache)[:, :vocab])
        tokens = sampling.sample(torch.cat(logits), self._sent(uniform))[:, None]
        for key, token in zip(keys, tokens, strict=True):
            self._texts[key].pieces.append(token)
        return tokens

    @torch.no_grad()
    def write(self, keys: Sequence[int], sampling: Sampling, vocab: int, uniform: Tensor) -> Tensor:
        """Samples n tokens for each text.

        The method appends n tokens to the cache: the token that the previous call sampled last, and all new tokens
        except the last.

        Args:
            keys: the keys of the texts. `begins` must return False for each key.
            sampling: the sampling settings.
            vocab: the number of logits to use, from id 0.
            uniform: random numbers in [0, 1), f64 [n, texts] on the host, with n <= BLOCK and n <= `room(keys)`.

        Returns:
            The sampled tokens, i64 [texts, n] on the device. A token is -1 if the largest logit is not finite. The
            tokens of a row after -1 are meaningless.
        """
        texts, steps = [self._texts[key] for key in keys], len(uniform)
        reach = max(self.pages_of(text.length + steps) for text in texts)
        reach = min(-(-reach // self._stride) * self._stride, self._most)
        count = 1 << (len(texts) - 1).bit_length() if self.rounds else len(texts)
        shape = count, reach, sampling, vocab
        if shape not in self._rows:
            self._rows[shape] = _Rows(self._step, self._cache, *shape, self._device)
        rows = self._rows[shape]
        rows.fill(texts, [[*text.pages, *[self._spare] * reach][:reach] for text in texts], self._spare, uniform)
        for _ in range(steps):
            rows.replayed()
        tokens = rows.tokens[: len(texts), :steps].clone()
        for text, row in zip(texts, tokens, strict=True):
            text.pieces.append(row)
            text.length += steps
        return tokens

    def _sent(self, values: Tensor) -> Tensor:
        return _copied_to(torch.empty_like(values, device=self._device), values)


class _Rows:
    """The tensors of a decoding step, at fixed addresses, for a fixed number of rows and a fixed number of pages.

    The attribute `replayed` runs a step: it appends a token to the text of each row, and samples the next token.

    Args:
        step: a function that appends a token to each text.
        cache: the pages of the cache.
        count: the number of rows.
        reach: the number of pages that the step reads for each row.
        sampling: the sampling settings.
        vocab: the number of logits to use, from id 0.
        device: the device of the pages.
    """

    def __init__(
        self,
        step: StepFunction,
        cache: Cache,
        count: int,
        reach: int,
        sampling: Sampling,
        vocab: int,
        device: torch.device,
    ) -> None:
        self._step, self._cache, self._sampling, self._vocab = step, cache, sampling, vocab
        self._next = torch.zeros(count, dtype=torch.int64, device=device)
        # The argument `counters` of `Sampling.choose`, followed by the argument `starts` of the step
        self._counters = torch.zeros(2 + count, dtype=torch.int64, device=device)
        self._table = torch.zeros(count, reach, dtype=torch.int64, device=device)
        self._uniform = torch.zeros(BLOCK, count, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(count, BLOCK, dtype=torch.int64, device=device)
        self.replayed = Replayed(self._work, device)

    def fill(self, texts: Sequence[_Text], table: Sequence[Sequence[int]], spare: int, uniform: Tensor) -> None:
        """Copies the state of the texts into the first rows of the tensors.

        Args:
            texts: the texts to decode, at most one per row.
            table: the pages of each text.
            spare: the index of the spare page, which rows without a text use.
            uniform: random numbers, f64 [n, texts] on the host.
        """
        count, reach = self._table.shape
        pages = torch.full((count, reach), spare)
        pages[: len(texts)] = torch.tensor(table)
        counters = torch.zeros(2 + count, dtype=torch.int64)
        counters[0] = -1  # so that the first sampled token is in column 0
        counters[2 : 2 + len(texts)] = torch.tensor([text.length for text in texts])
        numbers = torch.zeros(BLOCK, count, dtype=torch.float64)
        numbers[: len(uniform), : len(texts)] = uniform
        for target, values in ((self._table, pages), (self._counters, counters), (self._uniform, numbers)):
            _copied_to(target, values)
        self._next[: len(texts)] = torch.cat([text.pieces[-1][-1:] for text in texts]).clamp(min=0)

    def _work(self) -> None:
        logits = self._step(self._next[:, None], self._counters[2:], self._table, self._cache)
        self._sampling.choose(logits[:, : self._vocab], self._uniform, self._counters[:2], self._next, self.tokens)
        self._counters.add_(1)


def _copied_to(target: Tensor, values: Tensor) -> Tensor:
    pinned = values.pin_memory() if target.device.type == "cuda" else values
    return target.copy_(pinned, non_blocking=True)


class PagedTexts(Decoder):
    """A `Decoder` for texts of equal length, for a model with a paged cache.

    Args:
        model: the model, on `device`.
        window: the number of tokens at which a text is full.
        page: the number of positions of a page.
        device: the device of the model.
        rows: the number of texts.
        step: a function that appends a token to each text. None selects `model.step`.
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
        return [*self._cache, (self._pages[:, : -(-positions // self._page)].contiguous(),)]


class _RowsOfPages:
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
    """Returns a decoder for texts of equal length. If the model was generated with a paged cache, the decoder uses this
    cache.

    Args:
        model: the model, on `device`.
        window: the number of tokens at which a text is full.
        device: the device of the model.
        rows: the number of texts.
        step: a function that appends a token to each text. None selects the decoding program of the model.
    """
    if not hasattr(model, "step"):
        return Decoder(text_model(model), window, device, rows, step)
    pages = paged_model(model)
    page = next(tensor.shape[1] for layer in pages.new_cache(0) for tensor in layer)
    return PagedTexts(pages, window, page, device, rows, step)


def pages_for(lengths: Sequence[int], page: int, window: int, batch: int) -> int:
    """Returns a number of pages that suffices for any `batch` texts at once.

    Args:
        lengths: the number of tokens of each completed text.
        page: the number of positions of a page.
        window: the number of tokens at which a text is full.
        batch: the number of texts that are decoded at once.
    """
    return sum(sorted((-(-min(length, window) // page) for length in lengths), reverse=True)[:batch])
