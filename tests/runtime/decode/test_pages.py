"""Caches in pages: the same logits as the whole text, for texts of different lengths that join and leave."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import make_run, small_spec, write_text
from sampled_tokens import sample_tokens
from tiny_models import ATTENTION, MLP, Pair, float64, pair, tiny
from torch import Tensor

from specc.cli import app
from specc.compiler import pipeline
from specc.compiler.architectures.decoder import CacheSpec
from specc.compiler.programs import reference
from specc.compiler.programs.cost import cached_bytes, cached_numbers
from specc.compiler.programs.programs import LoweringError
from specc.compiler.spec.check import load
from specc.runtime import generate as generation
from specc.runtime.decode import many_texts
from specc.runtime.decode.many_texts import sample_texts
from specc.runtime.decode.pages import PagedDecoder, PagedTexts, in_pages, pages_for
from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import Decoder
from specc.runtime.errors import RunFailure
from specc.runtime.generate import generate, generate_many
from specc.runtime.hugging_face.recognizing import recognized
from specc.runtime.open_model import open_model
from specc.runtime.verify import step_by_step
from specc.runtime.verify import verify as checks

CPU = torch.device("cpu")
PAGE = 4
CASES: dict[str, dict[str, Any]] = {
    "grouped heads, rope, window": {
        "layers": ({**ATTENTION, "kv_heads": 1, "rope": {}, "mask": "j <= i and i - j < 5"}, MLP)
    },
    "score, sinks, positions": {
        "layers": ({**ATTENTION, "score": "s - slope(h) * (i - j)", "sinks": True, "exclude": {}}, MLP),
        "embed": [{"kind": "token"}, {"kind": "positions"}],
    },
    "latent": {"layers": ({"kind": "latent", "heads": 2, "kv_rank": 5, "rope_dim": 4}, MLP)},
}


def sample(case: dict[str, Any], folder: Path, paged: bool = True, **cache: Any) -> Pair:
    settings = {"page": PAGE if paged else None, **cache}
    spec = tiny(fuse=(), **case, **({"cache": settings} if paged or cache else {}))
    return pair(spec, folder / ("pages" if paged else "rows"))


class Forced(Sampling):
    """Samples given tokens, and records the logits of each row."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "tokens", deque[list[int]]())
        object.__setattr__(self, "logits", list[Tensor]())

    def pick(self, logits: Tensor, uniform: Tensor) -> Tensor:
        tokens: Any = self.tokens.popleft()
        self.logits.append(logits.clone())
        return torch.tensor([*tokens, *[0] * (len(logits) - len(tokens))])

    def __hash__(self) -> int:
        return id(self)

    tokens: deque[list[int]]
    logits: list[Tensor]


@pytest.mark.parametrize("rounds", [False, True], ids=["as many rows", "as on a GPU"])
@pytest.mark.parametrize("steps", [1, 4], ids=["one step", "several steps"])
@pytest.mark.parametrize("name", CASES)
def test_pages_have_the_logits_of_the_whole_text(name: str, steps: int, rounds: bool, tmp_path: Path) -> None:
    with float64(), torch.no_grad():
        tested = sample(CASES[name], tmp_path)
        ids = torch.cat(tested.batch())[:3]
        every = [tested.model.score(ids, torch.full_like(ids, token)) for token in range(11)]
        want = -torch.stack(every, -1)
        decoder, forced = PagedDecoder(tested.model, 12, PAGE, 9, CPU), Forced()
        decoder.rounds = rounds
        for layer in decoder._cache:
            for pages in layer:
                pages.fill_(1e6)  # positions that are not written yet must not be read
        lengths = {0: 5, 1: 2, 2: 1}  # tokens of each text, the last of which is not in the pages yet

        def check(texts: list[int], tokens: Tensor) -> None:
            for column, logits in zip(tokens.T, forced.logits, strict=True):
                for row, text in enumerate(texts):
                    got = logits[row].log_softmax(-1)
                    torch.testing.assert_close(got, want[text, lengths[text] - 1], rtol=1e-10, atol=1e-10)
                    assert int(column[row]) == following(text, 0)
                    lengths[text] += 1
            forced.logits.clear()

        def following(text: int, steps: int) -> int:
            return int(ids[text, lengths[text] + steps]) if lengths[text] + steps < 12 else 0

        for text, length in tuple(lengths.items()):
            decoder.join(text, ids[text, :length].tolist(), 12)
            forced.tokens.append([following(text, 0)])
            assert decoder.begins(text)
            check([text], decoder.begin([text], forced, 11, torch.zeros(1)))
        while texts := [text for text in lengths if not decoder.begins(text)]:
            many = min(steps, decoder.room(texts))
            forced.tokens.extend([following(text, step) for text in texts] for step in range(many))
            check(texts, decoder.write(texts, forced, 11, torch.zeros(many, len(texts))))
        assert set(lengths.values()) == {13}
        for text in lengths:
            decoder.leave(text)
        assert sorted(decoder._free) == list(range(9))


@pytest.mark.parametrize("name", CASES)
def test_codes_in_pages_and_in_rows_give_the_logits_of_the_reference(name: str, tmp_path: Path) -> None:
    with float64(), torch.no_grad():
        rows, pages = (sample(CASES[name], tmp_path, paged, dtype="e4m3") for paged in (False, True))
        ids = torch.cat(rows.batch())[:3]
        plain = pipeline.lower(rows.spec.plain, "cpu")
        exact: Any = step_by_step.ExactModel(plain, rows.params)
        decoders = (
            Decoder(rows.model, 12, CPU, 3),
            PagedTexts(pages.model, 12, PAGE, CPU, 3),
            Decoder(exact, 12, CPU, 3),
        )
        assert {t.dtype for layer in rows.model.new_cache(1, 4) for t in layer} == {torch.uint8, torch.float64}
        logits = [[decoder.prefill(ids[:, :4])] for decoder in decoders]
        for place, decoder in zip(logits, decoders, strict=True):
            place += [decoder.append(ids[:, at]).clone() for at in range(4, 12)]
        have, paged, want = (torch.stack(place, 1).log_softmax(-1) for place in logits)
        torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(paged, want, rtol=1e-9, atol=1e-9)
        every = [rows.model.score(ids, torch.full_like(ids, token)) for token in range(11)]
        error = (have + torch.stack(every, -1)[:, 3:]).abs()
        assert error.max() > 1e-4 and error.square().mean().sqrt() < 0.1 * have.std()  # e4m3 has 3 bits of mantissa


def test_a_cache_of_codes_is_smaller_and_checked(tmp_path: Path) -> None:
    case = CASES["grouped heads, rope, window"]
    numbers = {}
    for paged in (False, True):
        tested = sample(case, tmp_path, paged, dtype="e4m3")
        plain = pipeline.lower(tested.spec.plain, "sm90")
        numbers[paged] = cached_numbers(plain, 12), cached_bytes(plain, 12)
        found = list(checks._cache(tested.spec, _loaded(tested, tmp_path / str(paged))))
        assert [check.ok for check in found] == [True] and "the codes of the cache alone" in found[0].detail
    # two layers, k and v, one head of 4 channels and a scale, of a ring of 5 positions or of 3 pages
    assert numbers == {False: (2 * 2 * 5 * 5, 2 * 2 * 5 * 8), True: (2 * 2 * 12 * 5, 2 * 2 * 12 * 8)}
    pooled = {**ATTENTION, "mask": "j <= i and i - j < 3", "pool": {"by": "mean", "block": 2}}
    with pytest.raises(LoweringError, match=r"but this model also stores 0\.attention\.pooled_k"):
        pipeline.lower(tiny(layers=(pooled, MLP), fuse=(), cache={"page": None, "dtype": "e4m3"}), "cpu")


def test_the_step_of_pages_equals_its_reference(tmp_path: Path) -> None:
    with float64(), torch.no_grad():
        tested = sample(CASES["grouped heads, rope, window"], tmp_path)
        generator = torch.Generator().manual_seed(1)
        cache = [tuple(torch.randn(t.shape, generator=generator) for t in layer) for layer in tested.model.new_cache(6)]
        inputs = {"ids": torch.randint(11, (2, 3), generator=generator)}
        inputs |= {"starts": torch.tensor([4, 0]), "table": torch.tensor([[5, 1], [3, 0]])}
        names = [f"cache.{i}.attention.{key}" for i in range(len(cache)) for key in ("k", "v")]
        flat = dict(zip(names, [t.clone() for layer in cache for t in layer], strict=True))
        plain = pipeline.lower(tested.spec.plain, "cpu")
        want = reference.run(plain, "step", {**inputs, **flat}, tested.params)
        torch.testing.assert_close(
            tested.model.step(*inputs.values(), cache), want.pop("logits"), rtol=1e-11, atol=1e-11
        )
        written = dict(zip(names, [t for layer in cache for t in layer], strict=True))
        assert written.keys() == want.keys()
        for name, pages in want.items():
            torch.testing.assert_close(written[name], pages, rtol=1e-11, atol=1e-11)
        assert cached_numbers(plain, 9) == 2 * 2 * 3 * PAGE * 4  # two layers, k and v, three pages, one head of 4
    assert all(check.ok for check in checks._cache(tested.spec, _loaded(tested, tmp_path)))


def _loaded(tested: Pair, folder: Path) -> Any:
    from specc.runtime.model.load import initialize, instantiate

    loaded = instantiate(tested.spec, "cpu", folder / "checked")
    initialize(loaded, 0)
    return loaded


@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("rounds", [False, True], ids=["as many rows", "as on a GPU"])
def test_texts_that_join_and_leave_are_those_decoded_alone(rounds: bool, block: int, tmp_path: Path) -> None:
    case, sampling, generator = CASES["score, sinks, positions"], Sampling(0.7), torch.Generator().manual_seed(3)
    prompts = [torch.randint(11, (length,), generator=generator).tolist() for length in (1, 7, 3, 12, 2, 5, 4)]
    with float64(), torch.no_grad():
        pages, rows = sample(case, tmp_path), sample(case, tmp_path, paged=False)
        for written, last in ((30, None), (9, 10)):  # with 30 tokens, texts are full several times
            count = pages_for([len(prompt) + written for prompt in prompts], PAGE, 12, 3)
            decoder = PagedDecoder(pages.model, 12, PAGE, count - 1, CPU)  # one page too few: the last text waits
            decoder.rounds = rounds
            texts: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
            ended = []
            arguments = (prompts, 11, sampling, range(7), written, 3, last, block)
            for index, token, ends in sample_texts(decoder, *arguments):
                texts[index].append(token)
                ended += [index] if ends else []
            assert sorted(ended) == list(texts) and len(decoder._free) == count - 1
            for index, prompt in enumerate(prompts):
                alone = sample_tokens(
                    Decoder(rows.model, 12, CPU), torch.tensor([prompt]), 11, sampling, (index,), written
                )
                tokens = list(map(int, alone))
                assert texts[index] == (tokens[: tokens.index(last) + 1] if last in tokens else tokens)
            assert {len(text) for text in texts.values()} >= {written}
        assert len({len(text) for text in texts.values()}) > 1  # some texts end before
        together = [
            list(map(int, step))
            for step in sample_tokens(
                PagedTexts(pages.model, 12, PAGE, CPU, 2), torch.tensor([prompts[5]] * 2), 11, sampling, (5, 8), 9
            )
        ]
        assert [step[0] for step in together][: len(texts[5])] == texts[5]
        with pytest.raises(RunFailure, match="does not fit into"):
            for key in range(9):
                decoder.join(key, prompts[3], 12)


def test_blocks_that_the_host_reads_late_hold_the_same_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the host reads a block after the next one is computed."""
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(11, (length,), generator=generator).tolist() for length in (3, 1, 6, 2, 4, 12, 5, 1)]

    def late(blocks: Iterable[Tensor]) -> Iterator[list[list[int]]]:
        before: list[Tensor] = []
        for block in blocks:
            before.append(block)
            if len(before) > 1:
                yield before.pop(0).tolist()
        yield from (block.tolist() for block in before)

    with float64(), torch.no_grad():
        model = sample(CASES["grouped heads, rope, window"], tmp_path).model
        results = []
        for reads, block in ((None, 1), (late, 1), (late, 5), (late, 16)):
            if reads is not None:
                monkeypatch.setattr(many_texts, "on_the_host", reads)
            decoder = PagedDecoder(model, 12, PAGE, 8, CPU)
            texts: dict[int, list[int]] = {}
            for index, token, _ in sample_texts(decoder, prompts, 11, Sampling(0.9), range(8), 20, 3, 7, block):
                texts.setdefault(index, []).append(token)
            assert len(decoder._free) == 8 and len(texts) == 8
            results.append(texts)
        assert all(texts == results[0] for texts in results)
        assert {len(text) for text in results[0].values()} > {20}


def test_a_model_with_pages_is_still_one_of_its_family() -> None:
    text = (Path(__file__).parents[3] / "specs/llama3_1b.yaml").read_text().replace("count: 16", "count: 1")
    model = load(text)[0].model
    paged = model.model_copy(update={"cache": CacheSpec(page=32)})
    assert recognized(paged) == recognized(model)


def test_a_run_writes_many_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", small_spec(), str(write_text(tmp_path / "data")))
    prompts = ["a", "the longer prompt", "", "b c"]
    opened = open_model(run.directory, prepared=in_pages)
    texts = dict(generate_many(opened, prompts, 12, Sampling(), range(4), batch=2))
    with pytest.raises(RunFailure, match=r"different lengths: .*also stores .*documents0.start"):
        in_pages(tiny(layers=({**ATTENTION, "mask": "j <= i and document(i) == document(j)", "bos": 0}, MLP)))
    contiguous = open_model(run.directory)
    assert [texts[i] for i in range(4)] == [
        generate(contiguous, prompt, 12, seed=i) for i, prompt in enumerate(prompts)
    ]
    rows: list[int] = []
    monkeypatch.setattr(generation, "step_of", lambda loaded, count, compiled: rows.append(count))
    assert dict(generate_many(opened, prompts, 12, Sampling(), range(4), batch=100)) == texts
    assert dict(generate_many(opened, prompts, 0, Sampling(), range(4))) == dict.fromkeys(range(4), b"")
    assert rows == [4]  # few prompts use the kernels for few rows, with any batch
    prompts[1] = "a line ends only with\u2028 its \x0b newline"
    texts[1] = generate(contiguous, prompts[1], 12, seed=1)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts) + "\n")
    arguments = ["--prompts", str(file), "--max-tokens", "12", "--batch", "2"]
    assert app.run(["generate", str(run.directory), *arguments]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.removesuffix("\n").split("\n")]
    assert [line["prompt"] for line in lines] == prompts
    assert [line["text"] for line in lines] == [texts[i].decode(errors="replace") for i in range(4)]
