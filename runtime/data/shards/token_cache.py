"""A cache of tokenized text. An entry is a folder of shards for one source, split and tokenizer."""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from specc.compiler.generated_folder import replace_file
from specc.compiler.strict import StrictModel
from specc.runtime.data.documents.corpus import Corpus, find_corpus
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.shard_file import TokenShard
from specc.runtime.data.shards.tokenize import SHARD_TOKENS, write_shards
from specc.runtime.data.split import Split
from specc.runtime.data.tokenizers.tokenizer import Tokenizer, require_bos
from specc.runtime.errors import cannot_write
from specc.runtime.storage.atomic import sync_folder

FORMAT = 2  # version of the cache; version 1 wrongly cut files with a long first document into blocks
_RECORD = "stream.json"


class CacheRecord(StrictModel):
    """The record of an entry of the token cache.

    Attributes:
        format: the version of the format of the cache.
        source, split: the source of the text and its split, as passed to `open_cached`.
        tokenizer, tokenizer_digest, vocab: the name, the digest and the number of ids of the tokenizer.
        documents: the number of documents.
        document_bytes: the total size of the documents in bytes.
        tokens: the number of tokens.
        shards: the number of tokens in each shard.
        sha256: the SHA-256 (hex) of all tokens.
    """

    format: int
    source: str
    split: Split
    tokenizer: str
    tokenizer_digest: str
    vocab: int
    documents: int
    document_bytes: int
    tokens: int
    shards: tuple[int, ...]
    sha256: str


def open_cached(
    source: str | Path, split: Split, tokenizer: Tokenizer, cache: Path
) -> tuple[CacheRecord, tuple[TokenShard, ...]]:
    """Opens the cached tokens of one split of a text source. If the cache has no entry for the split, the function
    tokenizes the text and adds an entry.

    Args:
        source: a text source (see `specc.runtime.data.documents.corpus.documents`).
        split: "train" or "val".
        tokenizer: the tokenizer that produces the tokens.
        cache: the folder of the cache.

    Returns:
        The record of the entry, and its shards.

    Raises:
        DataError: if the tokenizer has no BOS, or the source cannot be used.
        DataIntegrityError: if the entry, or a compressed file of the source, is damaged.
        EnvironmentFailure: if the cache cannot be written.
    """
    require_bos(tokenizer)
    corpus = find_corpus(source, split)
    key = _key(corpus, tokenizer)
    folder = Path(cache) / f"{split}-{key[:32]}"
    try:
        if not (folder / _RECORD).exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(folder.name + ".lock")):
                if not (folder / _RECORD).exists():
                    _build(corpus, tokenizer, folder, key)
    except OSError as error:
        raise cannot_write(folder, error, "set XDG_CACHE_HOME to a folder on another disk") from error
    return _opened(folder, tokenizer)


def _key(corpus: Corpus, tokenizer: Tokenizer) -> str:
    facts = [FORMAT, corpus.listing(), corpus.in_val is not None, corpus.split, tokenizer.digest(), tokenizer.bos]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _build(corpus: Corpus, tokenizer: Tokenizer, folder: Path, key: str) -> None:
    _remove_strays(folder)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        written = write_shards(corpus, tokenizer, temporary, "{:06d}.bin", SHARD_TOKENS)
        if _key(corpus, tokenizer) != key:
            raise DataError(f"{corpus.source} changed during tokenization", "run again when the files no longer change")
        record = CacheRecord(
            format=FORMAT,
            source=corpus.source,
            split=corpus.split,
            tokenizer=tokenizer.name,
            tokenizer_digest=tokenizer.digest(),
            vocab=tokenizer.vocab,
            documents=written.documents,
            document_bytes=written.document_bytes,
            tokens=sum(written.shards.values()),
            shards=tuple(written.shards.values()),
            sha256=written.sha256,
        )
        replace_file(temporary / _RECORD, record.model_dump_json(indent=1))
        sync_folder(temporary)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_strays(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for stray in folder.parent.glob(".*.tmp"):
        entry = stray.name.removeprefix(".").split(".")[0]
        with contextlib.suppress(Timeout):
            lock = FileLock(folder.with_name(entry + ".lock"), timeout=0)
            with contextlib.nullcontext() if entry == folder.name else lock:
                shutil.rmtree(stray, ignore_errors=True)


def _opened(folder: Path, tokenizer: Tokenizer) -> tuple[CacheRecord, tuple[TokenShard, ...]]:
    hint = f"delete {folder}; it is created again from the source"
    try:
        record = CacheRecord.model_validate_json((folder / _RECORD).read_bytes())
        shards = tuple(TokenShard(folder / f"{index:06d}.bin") for index in range(len(record.shards)))
    except (OSError, ValidationError):
        raise DataIntegrityError(f"{folder / _RECORD} cannot be read", hint) from None
    except DataError as error:
        raise DataIntegrityError(error.message, hint) from None
    if tuple(shard.tokens for shard in shards) != record.shards or record.tokenizer_digest != tokenizer.digest():
        raise DataIntegrityError(f"{folder}: the shards are not those that {_RECORD} describes", hint)
    return record, shards
