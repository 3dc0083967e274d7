"""Files of byte counts beside shards: written for tokenizers that change text, and read by bits per byte."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_data_tokenizer import IDENTITY, MERGES, TEXT, train_sentencepiece
from test_data_tokenizer_files import gemma

from specc.cli.app import run
from specc.runtime.data.errors import DataIntegrityError
from specc.runtime.data.shards.check import check
from specc.runtime.data.shards.shard_file import NARROW, ShardWriter, TokenShard
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.data.tokenizers.ranks import tokenizer_json
from specc.runtime.data.windows.evaluation import WindowPlan
from specc.runtime.data.windows.stream import open_stream
from specc.runtime.metrics.bits_per_byte import ScoredText, evaluate_bits

DOCUMENTS = ["the quick  brown\n\nfox e\u0301 漢字 😀", "  leading ▁ mark and then the sun ", "x", "\u212b ﬁ ends \n"]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers that change text: NFC before byte-level BPE, Gemma's, and SentencePiece with and without its rules."""
    place = tmp_path_factory.mktemp("lossy")
    content = tokenizer_json([bytes([value]) for value in range(256)] + MERGES, "gpt2", ["<|endoftext|>"])
    (place / "nfc.json").write_text(json.dumps(json.loads(content) | {"normalizer": {"type": "NFC"}}))
    gemma([TEXT, *DOCUMENTS]).save(str(place / "gemma.json"))
    paths = [place / "nfc.json", place / "gemma.json", train_sentencepiece(place, "rules", TEXT)]
    paths.append(train_sentencepiece(place, "nomark", "abcabcbca\n" * 50, vocab_size=265, **IDENTITY))
    return {path.name: path for path in paths}


@pytest.mark.parametrize("name", ["nfc.json", "gemma.json", "rules.model", "nomark.model"])
def test_counts_sum_to_the_bytes_of_the_documents(names: dict[str, Path], tmp_path: Path, name: str) -> None:
    tokenizer = open_tokenizer(str(names[name]))
    for document in DOCUMENTS:
        ids = tokenizer.encode(document.encode())
        counts = tokenizer.byte_counts(document.encode(), ids)
        assert len(counts) == len(ids) and (counts >= 0).all() and counts.sum() == len(document.encode())
    text = tmp_path / "text"
    text.mkdir()
    for split in ("train", "val"):
        lines = (json.dumps({"text": document}) + "\n" for document in DOCUMENTS * 3)
        (text / f"{split}.jsonl").write_text("".join(lines))
    out = tmp_path / "out"
    options = ["--out", str(out), "--tokenizer", str(names[name]), "--name", "lossy", "--shard-tokens", "70"]
    assert run(["data", "pack", str(text), *options]) == 0
    assert not list(out.glob("*train_bytes*")) and len(list(out.glob("lossy_val_bytes_*.bin"))) > 1
    assert not any(finding.damage for finding in check(out).findings)
    stream = open_stream(out, "val", tokenizer, tmp_path)
    size = sum(len(document.encode()) for document in DOCUMENTS) * 3
    every = stream.read_bytes(0, stream.tokens)
    tokens = stream.read(0, stream.tokens)
    assert every.sum() == size and (every[tokens == tokenizer.bos] == 0).all()

    def score(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (targets % 7).double()

    for most in (None, 50):
        last = stream.tokens - 1 if most is None else most
        result = evaluate_bits(score, ScoredText(stream, tokenizer, most), WindowPlan(16, 2, 5))
        assert result.document_bytes == every[1 : last + 1].sum()
        bits = (tokens[1 : last + 1] % 7).astype(float).sum() / math.log(2)
        assert result.bpb == pytest.approx(bits / every[1 : last + 1].sum(), rel=1e-12)
    first = out / "lossy_val_bytes_000000.bin"
    values = TokenShard(first).read(0, 70)
    with ShardWriter(first, NARROW) as writer:
        writer.write(values + np.uint16(1))
    assert any("byte counts of" in str(finding) and finding.damage for finding in check(out).findings)
    wrong = open_stream(out, "val", tokenizer, tmp_path)
    with pytest.raises(DataIntegrityError, match=f"byte counts of the tokens sum to .* but the documents have {size}"):
        evaluate_bits(score, ScoredText(wrong, tokenizer), WindowPlan(16, 2))
    with ShardWriter(first, NARROW) as writer:
        writer.write(values[1:])
    with pytest.raises(DataIntegrityError, match="counts the bytes of 69 tokens, but the shard has 70"):
        open_stream(out, "val", tokenizer, tmp_path)
    first.unlink()
    with pytest.raises(DataIntegrityError, match=r"lossy_val_bytes_000000\.bin: missing, but other shards have byte"):
        open_stream(out, "val", tokenizer, tmp_path)
