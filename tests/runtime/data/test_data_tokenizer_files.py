"""Tokenizers of files against the libraries that read them: five pre-tokenizers, real text and random Unicode."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from specc.cli.app import run
from specc.compiler.spec.data.text import SpecialToken, TextData
from specc.runtime.data.documents.corpus import documents
from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.data.tokenizers.tiktoken import TiktokenTokenizer
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.data.tokenizers.tokenizer_json import JsonTokenizer

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {  # as their authors publish them
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s",
    "llama3": rf"{WORDS}|\p{{N}}{{1,3}}|{REST}",
    "qwen": rf"{WORDS}|\p{{N}}|{REST}",
    "nanochat": rf"{WORDS}|\p{{N}}{{1,2}}|{REST}",
}
TEXTS = 2000
VOCAB = 700


def real_documents() -> list[str]:
    texts: list[str] = []
    for document in documents("stdlib", "train"):
        text = document.decode()
        texts += [text[start : start + 150] for start in range(0, min(len(text), 3000), 150)]
        if len(texts) >= TEXTS:
            break
    return texts[:TEXTS]


def random_strings(seed: int) -> list[str]:
    """Strings of letters, digits, blanks, marks, emoji and arbitrary code points, without surrogates."""
    generator = random.Random(seed)
    pools: list[Callable[[], str]] = [
        lambda: generator.choice(" \t\n\r\x0b\x0c\x1c\x85\xa0\u2003\u3000") * generator.randrange(1, 5),
        lambda: chr(generator.randrange(32, 127)) * generator.randrange(1, 4),
        lambda: "".join(generator.choices("0123456789٣Ⅷ½", k=generator.randrange(1, 6))),
        lambda: generator.choice(["don't", "I'LL", "the ", " self", "<|endoftext|>", "<s>", "▁", "\U0001f469\u200d"]),
        lambda: chr(generator.choice([generator.randrange(0xD800), generator.randrange(0xE000, 0x110000)])),
    ]
    return ["".join(generator.choice(pools)() for _ in range(generator.randrange(20))) for _ in range(TEXTS)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return real_documents() + random_strings(7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    sample = folder / "text"
    sample.mkdir()
    (sample / "train.txt").write_text("\n<|endoftext|>\n".join(texts[:600]), encoding="utf-8")
    for pattern in PUBLISHED:
        for suffix in ("tiktoken", "json"):
            options = ["--out", str(folder / f"{pattern}.{suffix}"), "--vocab", str(VOCAB), "--pattern", pattern]
            assert run(["data", "tokenizer", str(sample), *options]) == 0
    assert run(["data", "tokenizer", str(sample), "--out", str(folder / "small.model"), "--vocab", "500"]) == 0
    gemma(texts[:300]).save(str(folder / "gemma.json"))
    return folder


def gemma(texts: list[str]) -> Any:
    """A tokenizer with the parts of Gemma 3's: spaces become U+2581, and unknown characters are bytes."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # in training only: else a text is a word
    fallback = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[*specials, *fallback], show_progress=False)
    library.train_from_iterator(texts, trainer)
    content = json.loads(library.to_str())
    content["added_tokens"] = content["added_tokens"][: len(specials)]
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    return library


def same(tokenizer: Tokenizer, texts: list[str], expected: Callable[[str], list[int]]) -> None:
    for text, ids in zip(texts, tokenizer.encode_batch([text.encode() for text in texts]), strict=True):
        assert ids.tolist() == expected(text), text


@pytest.mark.parametrize("pattern", list(PUBLISHED))
def test_ids_are_those_of_tiktoken_and_tokenizers(folder: Path, texts: list[str], pattern: str) -> None:
    path = folder / f"{pattern}.tiktoken"
    ours = open_tokenizer(TextData(tokenizer=path.name, pattern=pattern), [folder])
    ranks = {piece: rank for rank, piece in enumerate(ours._pieces[: VOCAB - 1])}  # type: ignore[attr-defined]
    special = {"<|endoftext|>": VOCAB - 1}
    reference = tiktoken.Encoding("x", pat_str=PUBLISHED[pattern], mergeable_ranks=ranks, special_tokens=special)
    assert (ours.vocab, ours.bos) == (VOCAB, VOCAB - 1)
    same(ours, texts, reference.encode_ordinary)
    theirs = tokenizers.Tokenizer.from_file(str(folder / f"{pattern}.json"))
    assert theirs.encode("a<|endoftext|>").ids[-1] == VOCAB - 1
    theirs.encode_special_tokens = True
    json_file = open_tokenizer(f"{pattern}.json", [folder])
    assert (json_file.vocab, json_file.bos, json_file.lossless) == (VOCAB, VOCAB - 1, True)
    same(json_file, texts, lambda text: theirs.encode(text, add_special_tokens=False).ids)
    same(json_file, texts, reference.encode_ordinary)  # both files of one training give the same ids
    table = json_file.piece_bytes()
    for tokenizer in (ours, json_file):
        for text in texts[::40]:
            ids = tokenizer.encode(text.encode())
            assert tokenizer.decode(ids) == text.encode()
            assert table.base[ids].sum() == len(text.encode())
    ids = np.random.default_rng(3).integers(0, VOCAB, 4000)  # any ids are bytes, valid UTF-8 or not
    expected = b"".join(reference.decode_single_token_bytes(int(i)) for i in ids if i != VOCAB - 1)
    assert ours.decode(ids) == json_file.decode(ids) == expected
    every = bytes(range(256)) * 3
    single = {bytes([value]): ids[0] for value in range(256) if (ids := [ranks[bytes([value])]])}
    assert json_file.decode([single[bytes([value])] for value in every]) == every


def test_ids_of_gemma_are_those_of_tokenizers(folder: Path, texts: list[str]) -> None:
    ours = open_tokenizer("gemma.json", [folder])
    theirs = tokenizers.Tokenizer.from_file(str(folder / "gemma.json"))
    theirs.encode_special_tokens = True
    assert (ours.bos, ours.lossless) == (2, False)
    same(ours, texts, lambda text: theirs.encode(text, add_special_tokens=False).ids)
    for text in texts[::40]:
        assert ours.decode(ours.encode(text.encode())) == text.replace("▁", " ").encode()
    every = bytes(range(256))
    assert ours.decode([theirs.token_to_id(f"<0x{value:02X}>") for value in every]) == every
    valid = ours.encode("é▁漢 x".encode())
    assert theirs.decode(valid.tolist()).encode() == ours.decode(valid) == "é 漢 x".encode()


@pytest.mark.parametrize("pattern", list(PUBLISHED))
def test_a_million_blanks_are_cut_as_the_pattern_cuts(folder: Path, pattern: str) -> None:
    ours = TiktokenTokenizer(folder / f"{pattern}.tiktoken", pattern)
    ranks = {piece: rank for rank, piece in enumerate(ours._pieces[: VOCAB - 1])}
    reference = tiktoken.Encoding("x", pat_str=PUBLISHED[pattern], mergeable_ranks=ranks, special_tokens={})
    blanks = [" ", "\t", "\n", "\r", "\x0b", "\x85", "\u3000"]
    generator = random.Random(2)
    for _ in range(20):
        runs = ["".join(generator.choices(blanks[: generator.randrange(1, 8)], k=2100)) for _ in range(2)]
        text = generator.choice(["the", "'s", "7", "-\n", ""]).join([*runs, ""])
        assert ours.encode(text.encode()).tolist() == reference.encode_ordinary(text)
    document = ("x" + " " * 1_100_000 + "the").encode()
    assert ours.decode(ours.encode(document)) == document


def test_special_tokens_have_the_ids_that_the_spec_states(folder: Path, tmp_path: Path) -> None:
    special = (SpecialToken(token="<a>"), SpecialToken(token="<b>", id=VOCAB + 5), SpecialToken(token="<c>"))
    data = TextData(tokenizer="gpt4.tiktoken", pattern="gpt4", special=special, bos="<c>")
    tokenizer = open_tokenizer(data, [folder])
    assert (tokenizer.vocab, tokenizer.bos) == (VOCAB + 7, VOCAB + 6)
    assert tokenizer.decode([65, VOCAB - 1, VOCAB, VOCAB + 6]) == tokenizer.decode([65])
    assert open_tokenizer("gpt4.tiktoken", [folder]).digest() != tokenizer.digest()
    for wrong, message in (
        ({"special": (SpecialToken(token="<a>", id=5),)}, "has the id 5, which another token has"),
        ({"bos": "<x>"}, r"BOS is <x>, but the special tokens are <\|endoftext\|>"),
        ({"pattern": "(a"}, "the pattern '.a' is not valid"),
    ):
        with pytest.raises(DataError, match=message):
            open_tokenizer(TextData(tokenizer="gpt4.tiktoken", **wrong), [folder])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"`train\.data\.pattern` does not apply to the tokenizer gpt4\.json"):
        open_tokenizer(TextData(tokenizer="gpt4.json", pattern="gpt4"), [folder])
    assert open_tokenizer(TextData(tokenizer="gemma.json", bos="<eos>"), [folder]).bos == 1
    with pytest.raises(DataError, match="has no token <x>"):
        open_tokenizer(TextData(tokenizer="gemma.json", bos="<x>"), [folder])


def test_a_pattern_that_skips_text_is_refused(folder: Path) -> None:
    whole = TiktokenTokenizer(folder / "gpt2.tiktoken", r"\p{L}+|\s+|[^\p{L}\s]+")
    assert whole.decode(whole.encode(b"any text, \xff1")) == b"any text, \xff1"
    with pytest.raises(DataError, match="more than 500,000 blank characters in a row, at character 1"):
        whole.encode(b"a" + b" " * 500_001)
    with pytest.raises(DataError, match="the pattern leaves out parts of a document"):
        TiktokenTokenizer(folder / "gpt2.tiktoken", r"\p{L}+").encode(b"any text")


def altered(folder: Path, **changes: Any) -> str:
    content = json.loads((folder / "gpt2.json").read_text())
    for path, value in changes.items():
        part = content
        *parents, last = path.split("__")
        for parent in parents:
            part = part[parent]
        part[last] = value
    return json.dumps(content)


def test_files_that_are_no_usable_tokenizer_json(folder: Path, tmp_path: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    for text, message in (
        ("", "not a tokenizer.json"),
        ("[]", "not a tokenizer.json"),
        ('{"model": {"type": "Foo"}}', "not a tokenizer.json"),
        ((folder / "gpt2.json").read_text()[:500], "not a tokenizer.json"),
        (altered(folder, model=words), "a model of type WordLevel, which cannot represent all text"),
        (altered(folder, model__dropout=0.1), "the tokenizer drops merges at random"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(DataError, match=message) as caught:
            JsonTokenizer(tmp_path / "bad.json")
        assert caught.value.exit_code == 2
    for changes in ({"normalizer": {"type": "NFC"}}, {"added_tokens": []}):
        (tmp_path / "ok.json").write_text(altered(folder, **changes))
        tokenizer = JsonTokenizer(tmp_path / "ok.json")
        assert (tokenizer.lossless, tokenizer.bos is None) == ("normalizer" not in changes, "added_tokens" in changes)
    with pytest.raises(DataError, match="not valid UTF-8 at byte 1"):
        tokenizer.encode(b"a\xff")


def test_training_names_what_it_cannot_do(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more, message in (
        ("x.bpe", ("--vocab", "300"), "unknown kind of tokenizer"),
        ("x.json", ("--vocab", "256"), "no room for 256 bytes and 1 special tokens"),
        ("x.json", ("--vocab", "900000"), "the text gives"),
        ("x.model", ("--vocab", "900000"), "SentencePiece cannot train 900,000 ids"),
        ("x.json", ("--vocab", "300", "--pattern", "(a"), "is not a regular expression"),
    ):
        assert run(["data", "tokenizer", str(folder / "text"), "--out", str(tmp_path / name), *more]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / name).exists()
    assert run(["data", "tokenizer", str(folder / "text"), "--out", str(folder / "gpt2.json"), "--vocab", "300"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_missing_package_ends_with_3(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module, name in (("tokenizers", "gpt2.json"), ("tiktoken", "gpt2.tiktoken"), ("sentencepiece", "small.model")):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(Exception, match=f"{module} is not installed\npip install {module}") as caught:
            open_tokenizer(name, [folder])
        assert caught.value.exit_code == 3  # type: ignore[attr-defined]


def test_a_trained_sentencepiece_model_keeps_text(folder: Path, texts: list[str]) -> None:
    tokenizer = open_tokenizer("small.model", [folder])
    for text in texts[:200]:
        assert tokenizer.decode(tokenizer.encode(text.encode())) == text.replace("▁", " ").encode()
    assert tokenizer.piece_bytes() is not None and tokenizer.bos == 1
