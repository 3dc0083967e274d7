"""The tokenizer of a run as Transformers opens it: the ids of specc, after the separator of documents."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from specc.cli.app import run
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.hugging_face.tokenizer_files import tokenizer_files

TEXTS = ("def f(x):\n    return x\n", "  don't 1234\r\n\n", "é漢\U0001f469\u200d x", "<|endoftext|>", "")
SPEC = """spec_version: 2
name: small
targets: [cpu]
model:
  kind: decoder
  vocab: 300
  dim: 32
  context: 32
  embed: [{kind: token}]
  blocks: {count: 1, layers: [{kind: mlp, ratio: 2, act: relu(x)}]}
train:
  data: DATA
  micro_batch: 4
  tokens_per_step: 128
  steps: 3
  optimizers: [{kind: adamw, match: "*", lr: 0.01}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "train.txt").write_text("def main(x): return don't 12 é\n" * 50)
    for suffix in ("json", "tiktoken"):
        options = ["--out", str(folder / f"plain.{suffix}"), "--vocab", "262", "--pattern", "gpt4"]
        assert run(["data", "tokenizer", str(folder / "train.txt"), *options]) == 0
    content = json.loads((folder / "plain.json").read_text())
    trims = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    first = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    ids = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [261], "tokens": ["<|endoftext|>"]}}
    template = {"type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": ids}
    for name, step in (("trims", trims), ("inserts", template)):
        (folder / f"{name}.json").write_text(json.dumps({**content, "post_processor": step}))
    (folder / "endless.json").write_text(json.dumps({**content, "added_tokens": []}))
    return folder


def spec_with(data: str) -> Spec:
    return load(SPEC.replace("DATA", data))[0]


@pytest.mark.parametrize("name", ["bytes", "plain.json", "trims.json", "inserts.json", "plain.tiktoken"])
def test_ids_follow_the_separator(name: str, folder: Path, tmp_path: Path) -> None:
    pattern = ", pattern: gpt4" if name.endswith("tiktoken") else ""
    spec = spec_with(f"{{tokenizer: {name}{pattern}}}")
    for file, content in tokenizer_files(spec, [folder]).items():
        (tmp_path / file).write_bytes(content)
    data: Any = spec.train.data
    ours, theirs = open_tokenizer(data, [folder]), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.bos_token_id == theirs.eos_token_id == ours.bos
    for text in TEXTS:
        ids = theirs(text, split_special_tokens=True).input_ids
        assert ids == [ours.bos, *ours.encode(text.encode()).tolist()], text
        assert theirs.decode(ids[1:]).encode() == text.encode()
    again = open_tokenizer("tokenizer.json", [tmp_path])  # what an import opens
    assert again.bos == ours.bos and again.encode(b"a b").tolist() == ours.encode(b"a b").tolist()


def test_files_that_need_no_change_have_their_bytes(folder: Path) -> None:
    for name in ("inserts.json", "endless.json"):
        written = tokenizer_files(spec_with(f"{{tokenizer: {name}}}"), [folder])
        assert written["tokenizer.json"] == (folder / name).read_bytes()
    assert "tokenizer_config.json" not in written  # no separator of documents
