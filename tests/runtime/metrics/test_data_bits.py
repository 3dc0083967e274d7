"""Bits per byte: both metrics against a second implementation, and every target exactly once."""

import base64
import dataclasses
import json
import math
import random
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from tiers import Trials, tiers

from specc.runtime.data.documents.corpus import documents
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.shard_file import ShardWriter
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.data.tokenizers.tokenizer import Tokenizer
from specc.runtime.data.windows.evaluation import WindowPlan, Windows
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.metrics.bits_per_byte import BitsPerByte, ScoredText, evaluate_bits
from specc.runtime.metrics.share import WHOLE, Share

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
WORDS = [
    "the",
    " the",
    "quick",
    "brown ",
    "fox\n",
    "  ",
    "😀",
    "é",
    "漢字",
    "\u2581",
    "\n\n",
    "12",
    " ",
    "don't",
    "\x00",
]


def bits(
    score: Score,
    stream: TokenStream,
    tokenizer: Tokenizer,
    length: int,
    batch: int,
    stride: int | None = None,
    max_tokens: int | None = None,
    share: Share = WHOLE,
    progress: Callable[[int, int], None] | None = None,
) -> BitsPerByte:
    text, plan = ScoredText(stream, tokenizer, max_tokens), WindowPlan(length, batch, stride)
    return evaluate_bits(score, text, plan, "cpu", share, progress)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bits")
    pieces = [bytes([value]) for value in range(256)] + [b"th", b"the", b" the", b"  ", b"\xe2\x96", b"\xe2\x96\x81"]
    lines = [base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces)]
    (folder / "small.tiktoken").write_bytes(b"".join(lines))
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and then thinks in the sun\n" * 40)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "small"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    text.unlink()
    generator = random.Random(1)
    texts = ["".join(generator.choices(WORDS, k=generator.randrange(1, 60))) for _ in range(100)]
    (folder / "val.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def model_nats(previous: int, target: int) -> float:
    """A stand-in for a model: any fixed positive function of the last two tokens."""
    return 0.25 + ((previous * 7919 + target * 104729) % 1009) / 100


def score(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0.25 + ((ids * 7919 + targets * 104729) % 1009).double() / 100


@pytest.mark.parametrize(
    ("bpb", "pieces", "lossless", "summary"),
    [
        (0.9627, 1.0856, False, "0.9627 bpb, 1.0856 bpb_pieces"),
        (None, 1.0856, False, "1.0856 bpb_pieces"),
        (1.0856, 1.0856, True, "1.0856 bpb"),
    ],
)
def test_metrics_are_told_by_their_own_names(bpb: float | None, pieces: float, lossless: bool, summary: str) -> None:
    """The same in a line of a run and in what its end says."""
    result = BitsPerByte(11.345, 10, None, 9, bpb, pieces, lossless)
    assert result.summary() == summary and result.line() == f"1.1345 nats/token, {summary}"


def second_implementation(name: str, folder: Path, last: int | None) -> tuple[float, float, int]:
    """bpb, bpb_pieces and bytes by pieces, token by token, from the libraries and the raw documents."""
    texts = list(documents(folder / "val.jsonl", "val"))
    sequence: list[tuple[int, bytes | None, bool]] = []  # id, bytes without the mark, had the mark
    if name == "small.model":
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
        for text in texts:
            sequence.append((model.bos_id(), None, False))
            for token, piece in zip(
                model.encode(text.decode()), model.encode(text.decode(), out_type=str), strict=True
            ):
                if model.is_byte(token):
                    sequence.append((token, bytes([int(piece[3:5], 16)]), False))
                else:
                    mark = piece[0] == "▁"
                    sequence.append((token, piece[mark:].encode(), mark))
    elif name == "bytes":
        for text in texts:
            sequence += [(256, None, False), *((value, bytes([value]), False) for value in text)]
    else:
        lines = (folder / name).read_bytes().splitlines()
        pieces = [base64.b64decode(line.split()[0]) for line in lines]
        tokenizer = open_tokenizer(name, [folder])
        for text in texts:
            ids = tokenizer.encode(text).tolist()
            sequence += [(len(pieces), None, False), *((token, pieces[token], False) for token in ids)]
    nats, size = Fraction(0), 0
    targets = sequence[1:] if last is None else sequence[1 : last + 1]
    for (before, before_text, _), (token, text_bytes, mark) in zip(sequence, targets, strict=False):
        nats += Fraction(model_nats(before, token))
        size += len(text_bytes or b"") + (mark and before_text is not None)
    whole = sum(map(len, texts))
    bits = float(nats) / math.log(2)
    lossless = name != "small.model"
    return bits / (size if lossless else whole), bits / size, size


@pytest.mark.parametrize("name", ["bytes", "small.tiktoken", "small.model"])
@pytest.mark.parametrize(
    ("length", "batch", "stride"), [(64, 4, None), (64, 3, 1), (64, 5, 17), (63, 1, 62), (7, 64, 7)]
)
def test_both_metrics_agree_with_a_second_implementation(
    folder: Path, tmp_path: Path, name: str, length: int, batch: int, stride: int | None
) -> None:
    tokenizer = open_tokenizer(name, [folder])
    stream = open_stream(folder / "val.jsonl", "val", tokenizer, folder / "cache")
    result = bits(score, stream, tokenizer, length, batch, stride=stride)
    bpb, bpb_pieces, size = second_implementation(name, folder, None)
    assert result.bpb == pytest.approx(bpb, rel=1e-9, abs=0)
    assert result.bpb_pieces == pytest.approx(bpb_pieces, rel=1e-9, abs=0)
    assert (result.tokens, result.piece_bytes) == (stream.tokens - 1, size)
    assert result.document_bytes == sum(map(len, documents(folder / "val.jsonl", "val")))
    assert (result.bpb == result.bpb_pieces) == tokenizer.lossless == (result.piece_bytes == result.document_bytes)


def random_text(rng: random.Random) -> str:
    """Words, and characters of any kind: marks, controls, emoji with joiners, other planes."""
    planes = ((0, 0x80), (0x80, 0x800), (0x300, 0x370), (0x2000, 0x2070), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF))
    spans = (*planes, (0xE000, 0xF8FF), (0x20000, 0x2A6DF))
    characters = [chr(rng.randrange(*rng.choice(spans))) for _ in range(rng.randrange(40))]
    pieces = [*characters, *rng.choices(WORDS, k=rng.randrange(1, 40))]
    rng.shuffle(pieces)
    return "".join(pieces)


@tiers("C19", documents_of_each_tokenizer=(50, 1_000))
def test_random_documents_have_the_bytes_of_their_tokens(trials: Trials, folder: Path, tmp_path: Path) -> None:
    rng = random.Random(19)
    lines = [json.dumps({"text": random_text(rng)}) + "\n" for _ in range(trials["documents_of_each_tokenizer"])]
    (tmp_path / "val.jsonl").write_text("".join(lines))
    for name in ("bytes", "small.tiktoken", "small.model"):
        if name != "bytes":
            shutil.copy(folder / name, tmp_path)
        tokenizer = open_tokenizer(name, [tmp_path])
        stream = open_stream(tmp_path / "val.jsonl", "val", tokenizer, tmp_path / "cache")
        result = bits(score, stream, tokenizer, 256, 8)
        bpb, bpb_pieces, size = second_implementation(name, tmp_path, None)
        assert result.bpb == pytest.approx(bpb, rel=1e-9, abs=0) and result.piece_bytes == size
        assert result.bpb_pieces == pytest.approx(bpb_pieces, rel=1e-9, abs=0)
        assert (result.piece_bytes == result.document_bytes) or not tokenizer.lossless


@pytest.mark.parametrize("name", ["bytes", "small.tiktoken", "small.model"])
def test_a_part_of_the_stream_has_the_bytes_of_that_part(folder: Path, name: str) -> None:
    tokenizer = open_tokenizer(name, [folder])
    stream = open_stream(folder / "val.jsonl", "val", tokenizer, folder / "cache")
    generator = random.Random(2)
    for _ in range(10):
        last = generator.randrange(5, stream.tokens - 1)
        stride = generator.randrange(1, 33)
        result = bits(score, stream, tokenizer, 32, 4, stride=stride, max_tokens=last)
        bpb, bpb_pieces, size = second_implementation(name, folder, last)
        assert (result.tokens, result.piece_bytes, result.document_bytes) == (last, size, None)
        assert result.bpb_pieces == pytest.approx(bpb_pieces, rel=1e-9, abs=0)
        assert result.bpb == (pytest.approx(bpb, rel=1e-9, abs=0) if tokenizer.lossless else None)
        assert "document bytes unknown" in result.audit()
    whole = bits(score, stream, tokenizer, 32, 4, max_tokens=stream.tokens + 5)
    assert whole == bits(score, stream, tokenizer, 32, 4)


def test_windows_meet_every_target_once_and_keep_their_context() -> None:
    generator = random.Random(3)
    for _ in range(500):
        last, length = generator.randrange(1, 400), generator.randrange(1, 50)
        stride = generator.randrange(1, length + 1)
        windows = Windows(last, length, stride)
        met: list[int] = []
        for k in range(len(windows)):
            window = windows[k]
            assert window.length == min(length, last) and window.start >= 0 and window.new >= 1
            targets = range(window.start + 1, window.start + window.length + 1)
            new = targets[window.length - window.new :]
            if k:
                assert new[0] - window.start > length - stride  # tokens of context, the target's own input included
            met += new
        assert met == list(range(1, last + 1))


class Wide(ByteTokenizer):
    """Takes any 16-bit token, so that a stream may count and each target tells its position."""

    vocab = 65_536
    bos: int | None = 0

    def piece_bytes(self) -> object:  # type: ignore[override]
        table = super().piece_bytes()
        return dataclasses.replace(
            table,
            base=np.minimum(np.arange(65_536), 1),
            leading_space=np.zeros(65_536, np.bool_),
            boundary=np.arange(65_536) == 0,
        )


def counting_stream(folder: Path, tokens: int) -> TokenStream:
    with ShardWriter(folder / "val_0.bin") as writer:
        writer.write(np.arange(tokens))
    return open_stream(folder, "val", Wide(), folder / "cache")


@pytest.mark.parametrize(
    ("tokens", "length", "batch", "stride"), [(5001, 64, 8, None), (5001, 64, 8, 10), (40, 64, 8, 5), (66, 64, 2, 64)]
)
def test_what_is_not_scored_does_not_touch_the_sum(
    tmp_path: Path, tokens: int, length: int, batch: int, stride: int | None
) -> None:
    seen: set[int] = set()
    shapes: set[tuple[int, ...]] = set()

    def poisoned(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == targets.dtype == torch.int64 and not torch.is_grad_enabled()
        assert torch.equal(targets, ids + 1)
        shapes.add(tuple(ids.shape))
        scores = torch.full(targets.shape, math.nan)
        for row, column in np.ndindex(*targets.shape):
            position = int(targets[row, column])
            if position not in seen:  # context and padding were scored before
                seen.add(position)
                scores[row, column] = position
        return scores

    stream = counting_stream(tmp_path, tokens)
    calls: list[tuple[int, int]] = []
    result = bits(
        poisoned, stream, Wide(), length, batch, stride=stride, progress=lambda done, todo: calls.append((done, todo))
    )
    assert result.nats == sum(range(tokens)) and result.tokens == tokens - 1 == result.piece_bytes
    assert result.bpb == pytest.approx(sum(range(tokens)) / math.log(2) / (tokens - 1), rel=1e-12)
    assert shapes == {(batch, min(length, tokens - 1))}
    assert calls[-1] == (tokens - 1, tokens - 1) and calls == sorted(calls)


def test_small_terms_survive_beside_large_ones(tmp_path: Path) -> None:
    stream = counting_stream(tmp_path, 60_001)

    def uneven(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.where(targets == 1, 2.0**24, 0.1).float()

    result = bits(uneven, stream, Wide(), 100, 100)
    assert result.nats == pytest.approx(2**24 + 59_999 * float(np.float32(0.1)), rel=1e-15, abs=0)


def test_a_loss_that_is_not_a_number_is_not_hidden(tmp_path: Path) -> None:
    stream = counting_stream(tmp_path, 1000)
    result = bits(lambda i, t: torch.where(t == 500, math.nan, 1.0), stream, Wide(), 64, 4)
    assert math.isnan(result.nats) and math.isnan(result.bpb_pieces)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 200])
def test_ranks_share_the_windows(folder: Path, world: int) -> None:
    tokenizer = open_tokenizer("small.tiktoken", [folder])
    stream = open_stream(folder / "val.jsonl", "val", tokenizer, folder / "cache")
    alone = bits(score, stream, tokenizer, 32, 4, stride=20)
    parts: list[np.ndarray] = []
    for rank in range(world):
        with pytest.raises(ZeroDivisionError):  # stop after the rank's own part is known
            stop = Share(rank, world, lambda nats: parts.append(nats) or 1 // 0)  # type: ignore[func-returns-value]
            bits(score, stream, tokenizer, 32, 4, stride=20, share=stop)
    total = np.sum(parts, axis=0)
    result = bits(score, stream, tokenizer, 32, 4, stride=20, share=Share(world - 1, world, lambda nats: total))
    assert result == alone  # to the last bit
    if world > 1:
        with pytest.raises(ValueError, match="needs `reduce`"):
            bits(score, stream, tokenizer, 32, 4, share=Share(0, world))
        with pytest.raises(RuntimeError, match="scored"):
            bits(score, stream, tokenizer, 32, 4, share=Share(0, world, lambda nats: nats))


def test_a_lossless_tokenizer_whose_bytes_do_not_add_up_is_refused(folder: Path) -> None:
    tokenizer = ByteTokenizer()
    stream = open_stream(folder / "val.jsonl", "val", tokenizer, folder / "cache")
    assert stream.document_bytes is not None
    wrong = dataclasses.replace(stream, document_bytes=stream.document_bytes + 1)
    with pytest.raises(DataIntegrityError, match="bytes is lossless, but the tokens represent"):
        bits(score, wrong, tokenizer, 64, 4)


def test_a_stream_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    stream = open_stream(folder / "val.jsonl", "val", ByteTokenizer(), folder / "cache")
    other: Tokenizer = open_tokenizer("small.tiktoken", [folder])
    with pytest.raises(DataError, match=r"not tokenized with small\.tiktoken"):
        bits(score, stream, other, 64, 4)
    with ShardWriter(tmp_path / "train.bin") as writer:
        writer.write(np.array([65, 256, 66]))
    shards = open_stream(tmp_path, "train", ByteTokenizer(), tmp_path)
    with pytest.raises(DataError, match="starts with token 65, not with the separator 256 of bytes"):
        bits(score, shards, ByteTokenizer(), 64, 4)


def test_shards_know_their_bytes_only_through_a_lossless_tokenizer(folder: Path, tmp_path: Path) -> None:
    for name in ("bytes", "small.model"):
        tokenizer = open_tokenizer(name, [folder])
        text = open_stream(folder / "val.jsonl", "val", tokenizer, folder / "cache")
        (tmp_path / name).mkdir()
        with ShardWriter(tmp_path / name / "val.bin") as writer:
            writer.write(text.read(0, text.tokens))
        shards = open_stream(tmp_path / name, "val", tokenizer, tmp_path / "cache")
        result = bits(score, shards, tokenizer, 64, 4)
        wanted = bits(score, text, tokenizer, 64, 4)
        assert result == dataclasses.replace(
            wanted, document_bytes=None, bpb=wanted.bpb if tokenizer.lossless else None
        )


def test_nothing_to_score(tmp_path: Path) -> None:
    stream = counting_stream(tmp_path, 100)
    with pytest.raises(DataError, match="the stream has 100 tokens, max_tokens is 0"):
        bits(score, stream, Wide(), 64, 4, max_tokens=0)
    (tmp_path / "one").mkdir()
    with pytest.raises(DataError, match="the stream has 1 tokens"):
        bits(score, counting_stream(tmp_path / "one", 1), Wide(), 64, 4)
    with ShardWriter(tmp_path / "one" / "val_0.bin") as writer:
        writer.write(np.zeros(9, np.int64))
    separators = open_stream(tmp_path / "one", "val", Wide(), tmp_path)
    with pytest.raises(DataError, match="represent no bytes"):
        bits(score, separators, Wide(), 64, 4)


@pytest.mark.parametrize("bad", [{"length": 0}, {"batch": 0}, {"stride": 0}, {"stride": 65}])
def test_sizes_that_make_no_sense_are_refused(tmp_path: Path, bad: dict[str, int]) -> None:
    stream = counting_stream(tmp_path, 100)
    with pytest.raises(ValueError, match="must be positive"):
        bits(score, stream, Wide(), **({"length": 64, "batch": 4} | bad))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be positive"):
        Share(rank=1)
    with pytest.raises(ValueError, match=r"the losses have the shape \(4,\), but the targets have the shape \(4, 64\)"):
        bits(lambda ids, targets: torch.zeros(4), stream, Wide(), 64, 4)


def test_the_audit_line_says_how_the_counts_compare() -> None:
    equal = BitsPerByte(1.0, 10, 1_234_567, 1_234_567, 1.0, 1.0, lossless=True)
    assert equal.audit() == "audit: sum of token bytes 1,234,567 == document bytes 1,234,567"
    lossy = BitsPerByte(1.0, 10, 1000, 994, 1.0, 1.0, lossless=False)
    assert lossy.audit() == (
        "audit: sum of token bytes 994 != document bytes 1,000 (gap -6, -0.60 %; the tokenizer is lossy)"
    )
    wrong = BitsPerByte(1.0, 10, 1000, 1010, 1.0, 1.0, lossless=True)
    assert wrong.audit().endswith("(gap +10, +1.00 %; the counts must agree: this is a bug)")
    unknown = BitsPerByte(1.0, 10, None, 994, None, 1.0, lossless=False)
    assert unknown.audit() == (
        "audit: sum of token bytes 994; document bytes unknown (token shards, or only a part was scored)"
    )
