"""Decoding in rows: each is the uncached one, none reads another, and on a GPU no step waits for the host."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from golf_models import OPTIONS, spec_of
from run_samples import VARIANTS, model_of, small_spec
from sampled_tokens import sample_tokens
from tiny_models import float64, pair, random_params
from torch import Tensor

from specc.compiler.pipeline import lower
from specc.compiler.spec.spec import Spec
from specc.runtime.decode import text as decoding
from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import Decoder, on_the_host, sample_blocks
from specc.runtime.model.protocols import GeneratedText
from specc.runtime.open_model import realize

CPU = torch.device("cpu")
ROWS = 3
# Where state beyond the keys and values is kept, and where keys are read in more than one way.
GOLF = ["full", "smear_bos", "smear_by_token_bos", "gate_sparse", "parallel", "loop_three_times_gated", "late_stack"]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that a text of a few tokens passes through caches of several lengths."""
    monkeypatch.setattr(decoding, "SHORTEST", 4)
    with float64():
        yield


def model_named(name: str, folder: Path) -> tuple[GeneratedText, int, int]:
    """A model in float64, its vocabulary, its context."""
    if name in OPTIONS:
        p = OPTIONS[name]
        return cast(GeneratedText, pair(spec_of(p), folder).model), p.vocab, p.context
    return cast(GeneratedText, model_of(small_spec(*VARIANTS[name])).model.double()), 257, 32


def texts(vocab: int, length: int, seed: int = 0) -> Tensor:
    """ROWS texts; marks between documents (1) stand in them, at another place in each."""
    ids = torch.randint(2, vocab, (ROWS, length), generator=torch.Generator().manual_seed(seed))
    for row in range(ROWS):
        ids[row, [2 + row, 9 + 2 * row]] = 1
    return ids


def uncached(model: GeneratedText, text: Tensor, vocab: int) -> Tensor:
    """Log-probabilities after each token of one text, [tokens, vocab], by `score`: a row for each target."""
    with torch.no_grad():
        targets = torch.arange(vocab)[:, None].expand(-1, len(text))
        return -model.score(text.expand(vocab, -1), targets).T


def cached(decoder: Decoder, ids: Tensor, prompt: int) -> Tensor:
    """Log-probabilities after `prompt` tokens of each text and after each of the rest, [rows, tokens, vocab]."""
    results = [decoder.prefill(ids[:, :prompt]).clone()]
    results += [decoder.append(ids[:, at]).clone() for at in range(prompt, ids.shape[1])]
    return torch.stack(results, 1).log_softmax(-1)


@pytest.mark.parametrize("prompt", [1, 6])
@pytest.mark.parametrize("name", [*GOLF, "grouped, rope over all dims", "window", "one head a group"])
def test_each_row_is_the_uncached_text_and_reads_no_other(name: str, prompt: int, tmp_path: Path) -> None:
    model, vocab, window = model_named(name, tmp_path)
    ids = texts(vocab, window)
    decoder = Decoder(model, window, CPU, ROWS)
    result = cached(decoder, ids, prompt)
    for row in range(ROWS):
        expected = uncached(model, ids[row], vocab)[prompt - 1 :]
        assert float((result[row] - expected).abs().max()) < 1e-5  # angles are f32
        assert float(expected.std(-1).min()) > 0.01  # the model tells tokens apart
    assert len(decoder._steps) > 3
    # Other texts in the other rows, and a decoder that has decoded before: not one bit of this row changes.
    other = texts(vocab, window, seed=1)
    other[1] = ids[1]
    changed = cached(decoder, other, prompt)
    assert torch.equal(changed[1], result[1])
    assert not torch.equal(changed[0], result[0]) and not torch.equal(changed[2], result[2])


def test_rows_slide_together_when_the_cache_is_full(tmp_path: Path) -> None:
    model, vocab, window = model_named("full", tmp_path)
    ids = texts(vocab, 2 * window + 5)
    rows = cached(Decoder(model, window, CPU, ROWS), ids, 3)
    start = 0
    for length in range(3, ids.shape[1] + 1):
        if length - start > window:
            start = length - 1 - window // 2
        expected = uncached(model, ids[2, start:length], vocab)[-1]
        assert float((rows[2, length - 3] - expected).abs().max()) < 1e-5, length
    assert start > window


def test_a_row_is_what_its_seed_gives_alone(tmp_path: Path) -> None:
    model, vocab, window = model_named("late_stack", tmp_path)
    seeds, start = (5, 11, 7, 5), torch.ones(1, 1, dtype=torch.int64)

    def text(seeds: tuple[int, ...], count: int = 40) -> Tensor:
        decoder = Decoder(model, window, CPU, len(seeds))
        steps = sample_tokens(decoder, start.expand(len(seeds), 1), vocab - 3, Sampling(0.9), seeds, count)
        return torch.stack(list(steps), 1)

    together = text(seeds)
    assert together.shape == (4, 40) and int(together.max()) < vocab - 3 and int(together.min()) >= 0
    for row, seed in enumerate(seeds):
        assert torch.equal(text((seed,))[0], together[row])
    assert torch.equal(together[0], together[3]) and not torch.equal(together[0], together[1])
    assert torch.equal(text(seeds, 17), together[:, :17])
    assert list(sample_tokens(Decoder(model, window, CPU), start, vocab, Sampling(), (0,), 0)) == []


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.9, 5), Sampling(1.1, None, 0.9)])
def test_tokens_do_not_depend_on_the_size_of_blocks(sampling: Sampling, tmp_path: Path) -> None:
    """Also past the end of the cache, where half of the text is read again, and after tokens that the caller gives."""
    model, vocab, window = model_named("full", tmp_path)
    count, start = 2 * window + 3, texts(vocab, window)[:, :4]
    results = []
    for block in (1, 7, count):
        decoder = Decoder(model, window, CPU, ROWS)
        blocks = list(sample_blocks(decoder, start, vocab, sampling, (1, 2, 3), count, block))
        assert [tokens.shape[1] for tokens in blocks] == [
            *[block] * (count // block),
            *[count % block] * (count % block > 0),
        ]
        results.append(torch.cat(blocks, 1))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert list(on_the_host(results)) == [result.tolist() for result in results]
    # Step by step, from logits of the same text.
    decoder = Decoder(model, window, CPU, ROWS)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
    uniform = torch.stack([torch.rand(count, dtype=torch.float64, generator=generator) for generator in generators], 1)
    logits = decoder.prefill(start)
    for at in range(count):
        tokens = sampling.pick(logits[:, :vocab], uniform[at])
        assert torch.equal(tokens, results[0][:, at]), at
        logits = decoder.append(tokens)


def test_draws_go_on_past_a_page_of_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, vocab, window = model_named("full", tmp_path)
    results = []
    for page in (1024, 7):
        monkeypatch.setattr(decoding, "PAGE", page)
        steps = sample_tokens(
            Decoder(model, window, CPU), torch.ones(1, 1, dtype=torch.int64), vocab, Sampling(), (3,), 25
        )
        results.append(torch.cat(list(steps)).tolist())
    assert results[0] == results[1] and len(set(results[0])) > 5


def on_gpu(spec: Spec) -> GeneratedText:
    """The unfused model in f32."""
    torch.set_default_dtype(torch.float32)
    weights = {name: value.float() for name, value in random_params(lower(spec, "cpu"), 0).items()}
    return cast(GeneratedText, realize(spec, "cpu", "cuda", weights, fuse=False).model)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GOLF)
def test_a_captured_step_is_the_eager_one(name: str) -> None:
    p, device = OPTIONS[name], torch.device("cuda")
    model = on_gpu(spec_of(p))
    ids = texts(p.vocab, p.context).to(device)
    decoder = Decoder(model, p.context, device, ROWS)
    for _ in range(2):  # the second time every step is replayed
        result = cached(decoder, ids, 1).cpu()
    assert all(step.replays for step in decoder._steps.values()) and len(decoder._steps) > 3
    for row in range(ROWS):
        with torch.no_grad():
            targets = torch.arange(p.vocab, device=device)[:, None].expand(-1, p.context)
            expected = -model.score(ids[row].expand(p.vocab, -1), targets).T.cpu()
        assert float((result[row] - expected).abs().max()) < 1e-4


@pytest.mark.gpu
def test_a_replayed_step_waits_for_nothing() -> None:
    p, device = OPTIONS["full"], torch.device("cuda")
    model = on_gpu(spec_of(p))
    start = torch.ones(2, 1, dtype=torch.int64, device=device)
    decoder = Decoder(model, p.context, device, 2)
    first = torch.stack(list(sample_tokens(decoder, start, p.vocab, Sampling(0.8), (1, 2), p.context)), 1)
    list(sample_tokens(decoder, start, p.vocab, Sampling(0.8), (1, 2), p.context))
    steps = sample_tokens(decoder, start, p.vocab, Sampling(0.8), (1, 2), p.context)
    again = [next(steps)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        again += list(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.stack(again, 1), first)
