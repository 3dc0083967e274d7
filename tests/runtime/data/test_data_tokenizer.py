"""Tokenizers: round trips, byte counts, lookup, and files that are not what they should be."""

import base64
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.data.tokenizers.patterns import PATTERNS
from specc.runtime.data.tokenizers.sentencepiece import SentencePieceTokenizer
from specc.runtime.data.tokenizers.tiktoken import TiktokenTokenizer
from specc.runtime.data.tokenizers.tokenizer import Tokenizer

MERGES = [b"th", b"the", b" the", b"in", b"  ", b"    ", b"\n\n", b"\xe2\x96", b"\xe2\x96\x81", b"\xf0\x9f"]
PIECES = [
    "the ", "in", " ", "  ", "\n", "\n\n", "\t", "\x00", "\x1c", "\x85", "\u3000", "don't", "I'LL", "12",
    "😀", "👩‍👩‍👧", "é", "e\u0301", "漢字", "\u2581", "\ufeff", "\ufffd", "?!",
    "<|endoftext|>", "<s>", "x" * 40, " " * 2500,
]  # fmt: skip


def random_documents(seed: int, count: int, invalid: bool) -> list[bytes]:
    """Documents of 0 to 29 odd pieces; every second one with bytes that are not UTF-8, if `invalid`."""
    generator = random.Random(seed)
    documents = []
    for index in range(count):
        parts = [generator.choice(PIECES).encode() for _ in range(generator.randrange(30))]
        if invalid and index % 2:
            parts.insert(generator.randrange(len(parts) + 1), generator.randbytes(generator.randrange(1, 9)))
            parts.insert(generator.randrange(len(parts) + 1), "\ud83d".encode("utf-8", "surrogatepass"))
        documents.append(b"".join(parts))
    return documents


def write_ranks(path: Path, pieces: list[bytes]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces)))
    return path


def train_sentencepiece(folder: Path, name: str, text: str, **options: object) -> Path:
    source = folder / f"{name}.txt"
    source.write_text(text, encoding="utf-8")
    defaults: dict[str, object] = {"model_type": "bpe", "vocab_size": 330, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(source), model_prefix=str(folder / name), **(defaults | options))
    return folder / f"{name}.model"


TEXT = "the quick brown fox jumps over the lazy dog and then thinks in the sun\n" * 40
IDENTITY = {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    write_ranks(folder / "small.tiktoken", [bytes([value]) for value in range(256)] + MERGES)
    train_sentencepiece(folder, "small", TEXT)
    indented = TEXT.replace("the ", "the    ")
    train_sentencepiece(folder, "identity", indented, allow_whitespace_only_pieces=True, **IDENTITY)
    return folder


@pytest.mark.parametrize("name", ["bytes", "small.tiktoken"])
def test_lossless_tokenizers_give_back_any_bytes_and_count_them(folder: Path, name: str) -> None:
    tokenizer = open_tokenizer(name, [folder])
    assert tokenizer.lossless and tokenizer.name == name
    table = tokenizer.piece_bytes()
    documents = random_documents(1, 1000, invalid=True)
    assert sum(b"\x00" in document for document in documents) > 100
    for document, ids in zip(documents, tokenizer.encode_batch(documents), strict=True):
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids) == document
        assert tokenizer.decode([tokenizer.bos or 0, *ids.tolist()]) == document
        assert tokenizer.bos not in ids
        np.testing.assert_array_equal(ids, tokenizer.encode(document))
        previous = np.concatenate([[tokenizer.bos], ids])[:-1] if len(ids) else ids
        assert table.count(previous, ids).sum() == len(document)
    assert table.count(np.array([65]), np.array([tokenizer.bos])).tolist() == [0]


def test_tiktoken_cuts_long_blanks_as_the_whole_text_would_be_cut(folder: Path) -> None:
    pieces = [bytes([value]) for value in range(256)] + MERGES
    whole = tiktoken.Encoding(
        "whole",
        pat_str=r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks={piece: rank for rank, piece in enumerate(pieces)},
        special_tokens={"<|endoftext|>": len(pieces)},
    )
    tokenizer = open_tokenizer("small.tiktoken", [folder])
    generator = random.Random(2)
    blanks = ["\n", " ", "\t", "\x0b", "\x85", "\xa0", "\u2003", "\u3000"]
    for document in random_documents(3, 300, invalid=False):
        assert tokenizer.encode(document).tolist() == whole.encode_ordinary(document.decode())
    for _ in range(50):
        runs = ["".join(generator.choices(blanks, k=generator.randrange(1900, 2100))) for _ in range(3)]
        text = generator.choice(["\x1c", "the", "'s", "7", "-", ""]).join([*runs, ""])
        assert tokenizer.encode(text.encode()).tolist() == whole.encode_ordinary(text)


@pytest.mark.parametrize("blank", [" ", "\n", "\u3000", " \n"])
def test_a_million_blanks_do_not_overflow_the_regex_stack(folder: Path, blank: str) -> None:
    tokenizer = open_tokenizer("small.tiktoken", [folder])
    document = ("x" + blank * 1_000_000 + "the" + blank * 1_000_000).encode()
    assert tokenizer.decode(tokenizer.encode(document)) == document


def test_tiktoken_counts_bytes_that_look_like_a_space_mark(folder: Path) -> None:
    tokenizer = open_tokenizer("small.tiktoken", [folder])
    ids = tokenizer.encode("\u2581".encode())
    assert ids.tolist() == [256 + MERGES.index(b"\xe2\x96\x81")]
    assert tokenizer.piece_bytes().count(np.array([65]), ids).tolist() == [3]


def test_identity_sentencepiece_counts_every_byte_but_the_space_after_bos(folder: Path) -> None:
    tokenizer = open_tokenizer("identity.model", [folder])
    assert not tokenizer.lossless
    table = tokenizer.piece_bytes()
    documents = [d for d in random_documents(4, 1000, invalid=False) if b"\x00" not in d and b"\xe2\x96\x81" not in d]
    assert len(documents) > 300
    for document in documents:
        ids = tokenizer.encode(document)
        assert tokenizer.decode(ids) == document
        previous = np.concatenate([[tokenizer.bos], ids])[:-1] if len(ids) else ids
        assert table.count(previous, ids).sum() == len(document) - document.startswith(b" ")


def test_normalizing_sentencepiece_reads_back_its_own_normal_form(folder: Path) -> None:
    tokenizer = open_tokenizer("small.model", [folder])
    ids = tokenizer.encode("the\nquick  brown 😀".encode())
    assert tokenizer.decode(ids) == "the quick brown 😀".encode()
    batch = random_documents(5, 1000, invalid=False)
    for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))
        once = tokenizer.decode(ids)
        assert tokenizer.decode(tokenizer.encode(once)) == once or b"\xe2\x81\x87" in once


def test_sentencepiece_table_follows_the_challenge(folder: Path) -> None:
    tokenizer = open_tokenizer("small.model", [folder])
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "small.model"))
    table = tokenizer.piece_bytes()
    byte, space, control = model.piece_to_id("<0x41>"), model.piece_to_id("▁the"), model.bos_id()
    assert (table.base[byte], table.leading_space[byte], table.boundary[byte]) == (1, False, False)
    assert (table.base[space], table.leading_space[space], table.boundary[space]) == (3, True, False)
    assert (table.base[control], table.leading_space[control], table.boundary[control]) == (0, False, True)
    assert table.boundary[model.unk_id()] and table.base[model.unk_id()] == 0
    pairs = [(byte, space, 4), (control, space, 3), (space, space, 4), (space, control, 0), (space, byte, 1)]
    previous, targets, expected = (np.array(column) for column in zip(*pairs, strict=True))
    assert table.count(previous, targets).tolist() == expected.tolist()


def test_a_model_without_the_space_mark_is_not_counted_by_pieces(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path, "nomark", "abcabcbca\n" * 50, vocab_size=265, **IDENTITY)
    tokenizer = SentencePieceTokenizer(path)
    assert len(tokenizer.encode(b"a b")) == 5  # the mark falls back to three bytes
    with pytest.raises(DataError, match=r"U\+2581 \(the space mark\) is not a piece"):
        tokenizer.piece_bytes()


def test_the_separator_is_bos_or_else_eos_or_else_none(tmp_path: Path, folder: Path) -> None:
    assert open_tokenizer("small.model", [folder]).bos == 1
    assert SentencePieceTokenizer(train_sentencepiece(tmp_path, "eos", TEXT, bos_id=-1, eos_id=1)).bos == 1
    assert SentencePieceTokenizer(train_sentencepiece(tmp_path, "none", TEXT, bos_id=-1, eos_id=-1)).bos is None


def test_sentencepiece_refuses_invalid_utf8(folder: Path) -> None:
    with pytest.raises(DataError, match="not valid UTF-8 at byte 2") as caught:
        open_tokenizer("small.model", [folder]).encode(b"ab\xff")
    assert ".tiktoken" in caught.value.hint


@pytest.mark.parametrize("name", ["bytes", "small.tiktoken", "small.model"])
def test_ids_out_of_range_are_errors(folder: Path, name: str) -> None:
    tokenizer = open_tokenizer(name, [folder])
    for bad in (-1, tokenizer.vocab, 70_000):
        with pytest.raises(DataError, match=f"no token {bad}"):
            tokenizer.decode([65, bad])


def test_tokenizers_are_found_in_the_search_folders_then_as_given(folder: Path, tmp_path: Path) -> None:
    assert open_tokenizer(str(folder / "small.tiktoken")).vocab == 257 + len(MERGES)
    assert open_tokenizer("small.model", [tmp_path, folder]).vocab == 330
    with pytest.raises(DataError) as caught:
        open_tokenizer("small.model", [tmp_path])
    assert caught.value.message == f"no tokenizer 'small.model'; searched {tmp_path}/small.model, small.model"
    with pytest.raises(DataError, match="unknown tokenizer 'gpt2'"):
        open_tokenizer("gpt2", [folder])


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x0a\xff\xff\xff\xff\x0f" * 9])
def test_files_that_are_no_sentencepiece_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.model").write_bytes(content)
    with pytest.raises(DataError, match="not a SentencePiece model"):
        open_tokenizer("bad.model", [tmp_path])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda lines: lines[:100], "156 of the 256 single bytes have no rank"),
        (lambda lines: lines[:7] + lines[8:], r"bad\.tiktoken:8: expected a new token in base64, then the rank 7"),
        (
            lambda lines: [*lines, lines[5].split()[0] + b" 266"],
            r"bad\.tiktoken:267: expected a new token in base64, then the rank 266",
        ),
        (lambda lines: [*lines[:3], b"!!! 3", *lines[4:]], r"bad\.tiktoken:4: "),
        (lambda lines: [*lines[:3], b"AA==", *lines[4:]], r"bad\.tiktoken:4: "),
        (lambda lines: [*lines[:3], b"AA== x", *lines[4:]], r"bad\.tiktoken:4: "),
        (lambda lines: [], "256 of the 256"),
    ],
)
def test_files_that_are_no_rank_file(folder: Path, tmp_path: Path, edit: object, message: str) -> None:
    assert callable(edit)
    lines = (folder / "small.tiktoken").read_bytes().splitlines()
    (tmp_path / "bad.tiktoken").write_bytes(b"\n".join(edit(lines)))
    with pytest.raises(DataError, match=message):
        open_tokenizer("bad.tiktoken", [tmp_path])


def test_large_vocabularies_take_32_bits(tmp_path: Path) -> None:
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    path = write_ranks(tmp_path / "large.tiktoken", [bytes([value]) for value in range(256)] + pairs)
    tokenizer = TiktokenTokenizer(path)
    assert tokenizer.vocab == 256 + 65536 + 1
    ids = tokenizer.encode(b"\xff\xffzz")
    assert ids.dtype == np.uint32 and tokenizer.decode(ids) == b"\xff\xffzz"
    assert ids.tolist() == [255, 255, 256 + pairs.index(b"zz")]


def test_the_digest_tells_tokenizers_apart(folder: Path, tmp_path: Path) -> None:
    tokenizers: list[Tokenizer] = [
        open_tokenizer("bytes"),
        *(open_tokenizer(name, [folder]) for name in ("small.tiktoken", "small.model", "identity.model")),
        TiktokenTokenizer(write_ranks(tmp_path / "small.tiktoken", [bytes([value]) for value in range(256)])),
    ]
    assert len({tokenizer.digest() for tokenizer in tokenizers}) == len(tokenizers)
    assert open_tokenizer("small.model", [folder]).digest() == tokenizers[2].digest()


def test_the_pattern_is_gpt2s() -> None:
    import regex

    original = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    ours = regex.compile(PATTERNS["gpt2"].regex)
    for document in random_documents(6, 300, invalid=False):
        assert ours.findall(document.decode()) == original.findall(document.decode())


def test_importing_the_package_loads_no_library_that_a_command_may_not_need() -> None:
    heavy = "{'torch', 'sentencepiece', 'tiktoken'}"
    program = f"import sys, specc.runtime.data; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
