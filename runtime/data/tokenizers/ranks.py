"""Converts between the ranks of a byte-level BPE and a `tokenizer.json`.

The rank of a token is its index in the order of merges.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.patterns import PATTERNS
from specc.runtime.data.tokenizers.tokenizer_json import byte_spelling

Ranks = Sequence[bytes]  # the bytes of each token, by rank


def ranks_of(content: Mapping[str, Any], path: Path) -> Ranks:
    """Returns the ranks of the tokens in a byte-level `tokenizer.json`, without added tokens. `content` is the parsed
    JSON of the file `path`.

    Raises DataError if the file is not a byte-level BPE, or if its token ids are not the ranks.
    """
    model, spelling = content.get("model") or {}, byte_spelling()
    added = {token["content"] for token in content.get("added_tokens") or ()}
    words = {word: rank for word, rank in (model.get("vocab") or {}).items() if word not in added}
    ordered = sorted(words, key=words.__getitem__)
    byte_level = (
        model.get("type") == "BPE" and spelling.keys() >= set("".join(ordered)) and set(ordered) >= set(spelling)
    )
    if not byte_level or [words[word] for word in ordered] != list(range(len(ordered))):
        message = f"{path}: not a byte-level BPE whose ids are the ranks of its merges"
        raise DataError(message, "use the tokenizer.json itself as the tokenizer")
    return [bytes(spelling[char] for char in word) for word in ordered]


def rank_file(ranks: Ranks) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))


def tokenizer_json(ranks: Ranks, pattern: str, special: Sequence[str]) -> str:
    """Returns the text of a `tokenizer.json` for ranks. With this file, the library `tokenizers` returns the same ids
    as tiktoken.

    tiktoken merges two tokens if their concatenation has a rank. The file therefore lists every such pair as a merge.
    tiktoken does not split a piece that is a token. The file therefore sets `ignore_merges`.

    Args:
        ranks: the tokens by rank.
        pattern: the pre-tokenizer: a name in PATTERNS, or a regular expression of Oniguruma.
        special: the special tokens, whose ids follow the ranks.
    """
    characters = {value: char for char, value in byte_spelling().items()}
    words = ["".join(characters[value] for value in token) for token in ranks]
    known = set(words)
    merges = [
        [word[:cut], word[cut:]]
        for word in words
        for cut in range(1, len(word))
        if word[:cut] in known and word[cut:] in known
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    regex = PATTERNS[pattern].onig if pattern in PATTERNS else pattern
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": len(ranks) + k, "content": token, **flags} for k, token in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {word: rank for rank, word in enumerate(words)},
            "merges": merges,
        },
    }
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"
