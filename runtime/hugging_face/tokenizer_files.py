"""Writes the tokenizer of a run as files that Transformers reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.compiler.spec.data.text import TextData
from specc.compiler.spec.spec import Spec
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.tokenizers.files import read_file
from specc.runtime.data.tokenizers.open import find_file, open_tokenizer
from specc.runtime.data.tokenizers.ranks import tokenizer_json
from specc.runtime.data.tokenizers.tiktoken import parse_ranks
from specc.runtime.data.tokenizers.tokenizer_json import JsonTokenizer

SEPARATOR = "<|endoftext|>"
TOKENIZER, SETTINGS, PIECES = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"


def tokenizer_files(spec: Spec, search: Sequence[Path]) -> Mapping[str, bytes]:
    """Returns the files of the tokenizer of a spec, by name.

    With these files, Transformers places the document separator before a text, as `specc generate` does. The file of a
    SentencePiece model is copied unchanged. The result is empty if the format tokenizer.json cannot represent the
    tokenizer.

    Args:
        spec: the spec.
        search: folders to search for the tokenizer of the spec.

    Raises:
        DataError: if the file of the tokenizer is not found, or is not valid.
    """
    data = spec.train.data
    assert isinstance(data, TextData)
    if data.tokenizer == ByteTokenizer.name:
        return {TOKENIZER: byte_level(), SETTINGS: _settings(SEPARATOR, spec.model.window)}
    path, tokenizer = find_file(data.tokenizer, search), open_tokenizer(data, search)
    if path.suffix == ".model":
        return {PIECES: read_file(path)}
    if isinstance(tokenizer, JsonTokenizer):
        if tokenizer.bos is None:
            return {TOKENIZER: read_file(path)}
        content, bos = json.loads(read_file(path)), tokenizer.word(tokenizer.bos)
        text = read_file(path) if tokenizer.inserted == [tokenizer.bos] else None
    else:
        ranks, text = list(parse_ranks(read_file(path), path)), None
        special = [entry.token for entry in data.special] or [SEPARATOR]
        if tokenizer.bos is None or tokenizer.vocab != len(ranks) + len(special):
            return {}
        content, bos = json.loads(tokenizer_json(ranks, data.pattern, special)), special[tokenizer.bos - len(ranks)]
    text = text or _json(_separated(content, bos, tokenizer.bos))
    return {TOKENIZER: text, SETTINGS: _settings(bos, spec.model.window)}


def byte_level() -> bytes:
    """Returns the content of a tokenizer.json that represents the tokenizer `bytes`.

    This tokenizer has one id per byte, and one id that separates documents.
    """
    content = json.loads(tokenizer_json([bytes([value]) for value in range(256)], "gpt2", [SEPARATOR]))
    content["pre_tokenizer"] = content["decoder"]
    return _json(_separated(content, SEPARATOR, ByteTokenizer.bos))


def is_byte_level(path: Path) -> bool:
    """Returns whether a file is the tokenizer.json that specc writes for the tokenizer `bytes`."""
    return path.read_bytes() == byte_level()


def _separated(content: Mapping[str, Any], bos: str, identity: int) -> Mapping[str, Any]:
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, *({"Sequence": {"id": name, "type_id": 0}} for name in "AB")],
        "special_tokens": {bos: {"id": bos, "ids": [identity], "tokens": [bos]}},
    }
    before = content.get("post_processor")
    if before is not None and before["type"] == "ByteLevel":  # this step only trims offsets, and inserts no tokens
        return {**content, "post_processor": {"type": "Sequence", "processors": [before, template]}}
    return {**content, "post_processor": template}


def _settings(bos: str, window: int) -> bytes:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": bos}
    return _json({**settings, "clean_up_tokenization_spaces": False, "model_max_length": window})


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()
