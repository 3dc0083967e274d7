"""Generation: the cache changes nothing, draws follow their distribution, text comes out whole."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import sentencepiece
import torch
from fork_server import output_of
from run_samples import VARIANTS, make_run, model_of, small_spec, write_text
from torch import Tensor, nn

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.tokenizers.sentencepiece import SentencePieceTokenizer
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.decode.sampling import Sampling, SamplingError
from specc.runtime.decode.text import Decoder
from specc.runtime.errors import RunFailure
from specc.runtime.generate import Detokenizer, generate, generate_several
from specc.runtime.model.load import Loaded
from specc.runtime.model.protocols import Cache, GeneratedText
from specc.runtime.open_model import OpenedModel, open_model

CPU = torch.device("cpu")
CONTEXT = 32


def uncached(model: GeneratedText, tokens: list[int]) -> Tensor:
    """Log-probabilities after each of `tokens`, [tokens, 257], by `score`: a row for each possible target."""
    ids = torch.tensor([tokens]).repeat(257, 1)
    targets = torch.arange(257)[:, None].repeat(1, len(tokens))
    with torch.no_grad():
        return -model.score(ids, targets).T


def decoded(decoder: Decoder, tokens: list[int], prompt: int) -> list[Tensor]:
    """The logits after `prompt` of the tokens, and after each of the rest."""
    first = decoder.prefill(torch.tensor([tokens[:prompt]]))[0]
    return [first, *(decoder.append(torch.tensor([token]))[0] for token in tokens[prompt:])]


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(257, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("variant", ["grouped, rope over all dims", "window"])
def test_when_the_cache_is_full_the_last_half_begins_a_new_one(variant: str) -> None:
    model = cast(GeneratedText, model_of(small_spec(*VARIANTS[variant])).model)
    tokens = tokens_of(2, 3 * CONTEXT)
    rows = decoded(Decoder(model, CONTEXT, CPU), tokens, 20)
    start = 0
    for length, row in enumerate(rows, 20):
        if length - start > CONTEXT:
            start = length - 1 - CONTEXT // 2
        if length % 4 == 0 or length - start <= CONTEXT // 2 + 2:
            expected = uncached(model, tokens[start:length])[-1]
            assert float((row.log_softmax(-1) - expected).abs().max()) < 1e-5, length
    assert start > CONTEXT


class Scripted(nn.Module):
    """Always gives the next token of a script, and keeps what it was shown."""

    def __init__(self, script: list[int], vocabulary: int = 257) -> None:
        super().__init__()
        self.script, self.vocabulary = iter(script), vocabulary
        self.broken_from: int | None = None
        self.calls: list[tuple[int, list[int]]] = []

    def prefill(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        self.calls.append((int(start), ids[0].tolist()))
        logits = torch.zeros(1, self.vocabulary)
        logits[0, next(self.script)] = 100.0 if len(self.calls) != self.broken_from else math.nan
        return logits

    decode = prefill

    def new_cache(self, rows: int, positions: int) -> Cache:
        return []


@dataclass
class Reports:
    """A generation streams its text and reports its speed."""

    lines: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def scripted(script: list[int], tokenizer: Tokenizer | None = None) -> tuple[OpenedModel, Scripted]:
    real = model_of(small_spec())
    vocabulary = 257 if tokenizer is None else tokenizer.vocab
    model = Scripted(script, vocabulary)
    loaded = Loaded(real.spec, real.target, real.programs, model, real.directory)
    opened = OpenedModel(real.spec, loaded, "artifact", Path("x.specc"), CPU, True, None, ())
    if tokenizer is not None:
        opened.__dict__["tokenizer"] = tokenizer
    return opened, model


def run_scripted(opened: OpenedModel, prompt: bytes, count: int) -> tuple[bytes, Reports]:
    reports = Reports()
    out = generate(opened, prompt, count, Sampling(0.0), say=reports.lines.append, stream=reports.texts.append)
    return out, reports


def test_the_text_starts_with_the_mark_and_the_prompt() -> None:
    opened, model = scripted([*b"xyz"])
    assert run_scripted(opened, b"ab", 3)[0] == b"xyz"
    assert model.calls == [(0, [256, *b"ab"]), (3, [*b"x"]), (4, [*b"y"])]
    opened, model = scripted([*b"q"])
    assert run_scripted(opened, b"", 1)[0] == b"q"
    assert model.calls == [(0, [256])]


def test_a_broken_model_is_a_failed_run() -> None:
    opened, model = scripted([*b"abc"])
    texts: list[str] = []
    model.broken_from = 3
    with pytest.raises(RunFailure, match="the logits contain NaN or infinity"):
        generate(opened, b"", 9, Sampling(0.0), stream=texts.append)
    assert "".join(texts) == "ab"


def test_it_ends_at_the_mark_between_documents() -> None:
    opened, model = scripted([*b"hi", 256, *b"never"])
    out, reports = run_scripted(opened, b"", 100)
    assert out == b"hi" and "".join(reports.texts) == "hi"
    assert len(model.calls) == 3


def test_no_tokens_is_no_work_and_fewer_is_an_error() -> None:
    opened, model = scripted([])
    assert run_scripted(opened, b"ab", 0)[0] == b"" and model.calls == []
    with pytest.raises(SamplingError, match="cannot generate -1 tokens"):
        generate(opened, b"", -1)


def test_of_a_long_prompt_the_end_is_read_with_a_word_about_it() -> None:
    opened, model = scripted([*b"z"])
    prompt = bytes(range(65, 65 + 40))
    out, reports = run_scripted(opened, prompt, 1)
    assert out == b"z" and model.calls == [(0, [*prompt[-CONTEXT:]])]
    assert reports.lines == ["the prompt has 40 tokens and the context 32: only the end of the prompt is read"]
    fits, model = scripted([*b"z"])
    assert run_scripted(fits, prompt[: CONTEXT - 1], 1)[1].lines == []


def test_any_number_of_tokens_can_be_generated() -> None:
    script = [65 + i % 26 for i in range(200)]
    opened, model = scripted(script)
    assert run_scripted(opened, b"", 200)[0] == bytes(script)
    shown = [256, *script]
    for start, ids in model.calls:
        assert start + len(ids) <= CONTEXT
        assert len(ids) == 1 or start == 0
    position = 0
    for k, (start, ids) in enumerate(model.calls):
        assert ids == shown[k + 1 - len(ids) : k + 1]  # it ends with the newest token
        assert start in (0, position)
        position = start + len(ids)
    assert sum(start == 0 for start, _ in model.calls) == 12


def test_characters_are_streamed_whole() -> None:
    text = "aé→😀ß"
    opened, _ = scripted([*text.encode(), 256])
    out, reports = run_scripted(opened, b"", 100)
    assert out == text.encode() and reports.texts == list(text)


def test_bytes_that_are_no_text_are_returned_as_they_are_and_shown_as_replacements() -> None:
    raw = b"a\xff\xe2\x82b\xe2\x82"
    opened, _ = scripted([*raw, 256])
    out, reports = run_scripted(opened, b"", 100)
    assert out == raw and "".join(reports.texts) == raw.decode(errors="replace")


def test_a_tokenizer_with_fewer_ids_than_the_model_limits_the_draw() -> None:
    class Short(ByteTokenizer):
        vocab = 100
        bos = 99

    opened, model = scripted([65, 66])
    model.vocabulary = 257
    opened.__dict__["tokenizer"] = Short()
    assert run_scripted(opened, b"", 2)[0] == b"AB"

    class Loud(Scripted):
        def prefill(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
            logits = super().prefill(ids, start, cache)
            logits[:, 200] = 1000.0
            return logits

        decode = prefill

    loaded = Loaded(opened.spec, opened.loaded.target, opened.loaded.programs, Loud([65, 66]), opened.path)
    loud = OpenedModel(opened.spec, loaded, "artifact", opened.path, CPU, True, None, ())
    loud.__dict__["tokenizer"] = Short()
    assert run_scripted(loud, b"", 2)[0] == b"AB"


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentencePieceTokenizer]:
    """Few pieces, so that most characters beyond ASCII are spelled in bytes."""
    folder = tmp_path_factory.mktemp("pieces")
    source = folder / "text.txt"
    source.write_text("the quick brown fox thinks in the sun\n" * 40, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(source),
        model_prefix=str(folder / "p"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    yield SentencePieceTokenizer(folder / "p.model")


@pytest.mark.parametrize("text", ["the quick fox", "thinks → in 😀 the ßun", "a b  c", "漢字 the"])
@pytest.mark.parametrize("prompt", ["", "the fox", "漢"])
def test_a_lossy_tokenizer_gives_the_text_that_it_would_give_at_once(
    pieces: SentencePieceTokenizer, text: str, prompt: str
) -> None:
    assert pieces.bos is not None
    start = [pieces.bos, *pieces.encode(prompt.encode()).tolist()]
    added = pieces.encode(text.encode()).tolist()
    detokenizer = Detokenizer(pieces, start)
    given = [detokenizer.add(token) for token in added]
    whole = pieces.decode([*start, *added])
    assert b"".join([*given, detokenizer.finish()]) == whole[len(pieces.decode(start)) :]
    for part in given:
        assert "\ufffd" not in part.decode()  # each is text by itself


def test_an_unfinished_character_is_given_at_the_end(pieces: SentencePieceTokenizer) -> None:
    assert pieces.bos is not None
    first = pieces.encode("漢".encode()).tolist()[:-1]
    detokenizer = Detokenizer(pieces, [pieces.bos])
    given = b"".join(detokenizer.add(token) for token in first)
    assert (given + detokenizer.finish()).decode() == pieces.decode(first).decode()
    assert "\ufffd" not in given.decode()


SCRIPT = """
import sys
from pathlib import Path
from specc.runtime.generate import Sampling, generate
from specc.runtime.open_model import open_model
out = generate(open_model(Path(sys.argv[1])), b"the ", 50, Sampling(1.0, 50, 0.95), seed=int(sys.argv[2]))
sys.stdout.buffer.write(out)
"""


def test_one_seed_gives_one_text_in_every_process(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(), str(write_text(tmp_path / "data")))
    opened = open_model(run.directory)
    sampling = Sampling(1.0, 50, 0.95)
    texts = [generate(opened, b"the ", 50, sampling, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert output_of(SCRIPT, str(run.directory), "1", folder=tmp_path) == texts[0]


def test_greedy_text_is_the_most_probable_token_each_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(), str(write_text(tmp_path / "data")))
    opened = open_model(run.directory)
    tokens = [256, *b"the "]
    for _ in range(CONTEXT - len(tokens)):
        tokens.append(int(uncached(opened.text_model, tokens)[-1].argmax()))
    expected = bytes(token for token in tokens[5:] if token != 256)
    assert 256 not in tokens[5:]
    assert generate(opened, b"the ", CONTEXT - 5, Sampling(0.0)) == expected


class Rows(nn.Module):
    """Gives each row the next token of a script of its own; the last one again when it ends."""

    def __init__(self, scripts: list[list[int]]) -> None:
        super().__init__()
        self.scripts, self.calls = scripts, 0

    def prefill(self, ids: Tensor, start: Tensor, cache: Cache) -> Tensor:
        logits = torch.zeros(len(self.scripts), 257)
        for row, script in enumerate(self.scripts):
            logits[row, script[min(self.calls, len(script) - 1)]] = 100.0
        self.calls += 1
        return logits

    decode = prefill

    def new_cache(self, rows: int, positions: int) -> Cache:
        return []


def test_each_of_several_texts_ends_by_itself() -> None:
    opened, _ = scripted([])
    model = Rows([[*b"ab", 256, *b"never"], [*b"wxyz", 256], [256, *b"no"]])
    loaded = Loaded(opened.spec, opened.loaded.target, opened.loaded.programs, model, opened.path)
    several = OpenedModel(opened.spec, loaded, "artifact", opened.path, CPU, True, None, ())
    assert generate_several(several, b"", 50, Sampling(0.0), (1, 2, 3)) == [b"ab", b"wxyz", b""]
    assert model.calls == 5


def test_a_prompt_of_any_bytes_is_read_and_half_a_surrogate_is_refused() -> None:
    """The command line spells bytes that are not UTF-8 as surrogate escapes."""
    for prompt in ("\udcff\udc80x", b"\xff\x80x"):
        opened, model = scripted([*b"ab", 256])
        assert generate(opened, prompt, 5, Sampling(0.0)) == b"ab"
        assert model.calls[0] == (0, [256, 0xFF, 0x80, ord("x")])
    opened, _ = scripted([*b"ab", 256])
    with pytest.raises(DataError, match="half a surrogate pair at character 1"):
        generate(opened, "a\ud83d", 5, Sampling(0.0))


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30])
def test_a_seed_of_more_than_64_bits_is_refused(seed: int) -> None:
    opened, _ = scripted([*b"ab", 256])
    with pytest.raises(SamplingError, match=f"the seed {seed} has more than 64 bits"):
        generate(opened, b"", 5, Sampling(0.0), seed)
    assert generate(opened, b"", 5, Sampling(0.0), 2**64 - 1) == b"ab"
