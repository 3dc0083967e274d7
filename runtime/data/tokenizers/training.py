"""Trains tokenizers: byte-level BPE with the library `tokenizers`, and SentencePiece models."""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specc.runtime.data.documents.corpus import split_corpus
from specc.runtime.data.documents.formats import Bounds
from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.files import missing_package
from specc.runtime.data.tokenizers.patterns import PATTERNS
from specc.runtime.data.tokenizers.ranks import rank_file, ranks_of, tokenizer_json
from specc.runtime.errors import cannot_write
from specc.runtime.storage.atomic import create_folder, write_atomically

_LINE_CHARACTERS = 4096  # SentencePiece skips longer sentences


@dataclass(frozen=True, slots=True)
class TrainingText:
    """The options of training a tokenizer.

    Attributes:
        sources, bounds: the arguments of `specc.runtime.data.documents.corpus.split_corpus`. Only the train split is
            read.
        out: the file to write. Its suffix selects the kind: `.json` or `.tiktoken` for a byte-level BPE, or `.model`
            for SentencePiece.
        vocab: the number of ids, including special tokens.
        pattern: the pre-tokenizer of a byte-level BPE: a name in PATTERNS, or a regular expression of Oniguruma.
        special: the special tokens of a byte-level BPE. Their ids follow the merged tokens.
        most_bytes: the maximum total size of the documents to read, in bytes.
    """

    sources: tuple[str, ...]
    out: Path
    vocab: int
    pattern: str = "gpt2"
    special: tuple[str, ...] = ("<|endoftext|>",)
    bounds: Bounds | None = None
    most_bytes: int = 10**9


def train_tokenizer(options: TrainingText, say: Callable[[str], None]) -> None:
    """Trains a tokenizer on text, and writes the file of the tokenizer. Training is deterministic.

    Args:
        options: the text and the kind of the tokenizer.
        say: called with the number of documents and bytes that were read.

    Raises:
        DataError: if a source cannot be read, the output file exists or has an unknown suffix, or the pattern is not a
            valid regular expression. Also if the text or the kind of tokenizer does not allow a vocabulary of this
            size.
        EnvironmentFailure: if the package that trains the tokenizer is not installed, or the file cannot be written.
    """
    writers = {".json": _byte_level, ".tiktoken": _byte_level, ".model": _sentencepiece}
    train = writers.get(options.out.suffix)
    if train is None:
        raise DataError(f"{options.out}: unknown kind of tokenizer", f"name a file that ends in {' or '.join(writers)}")
    if options.out.exists():
        raise DataError(f"{options.out} already exists", "name another --out, or remove this file")
    corpus = split_corpus(options.sources, bounds=options.bounds)["train"]
    corpus.require_files()
    content = train(options, _texts(corpus.documents(), options.most_bytes, say))
    try:
        create_folder(options.out.absolute().parent)
        write_atomically(options.out, [content])
    except OSError as error:
        raise cannot_write(options.out, error) from error


def _texts(documents: Iterable[bytes], most_bytes: int, say: Callable[[str], None]) -> Iterator[str]:
    count = size = 0
    for document in documents:
        if size >= most_bytes:
            break
        count, size = count + 1, size + len(document)
        yield document.decode("utf-8", errors="replace")
    say(f"read {count:,} documents, {size:,} bytes")


def _byte_level(options: TrainingText, texts: Iterator[str]) -> bytes:
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise missing_package(options.out, "tokenizers") from None
    ranks_wanted = options.vocab - len(options.special)
    if ranks_wanted < 256:
        message = (
            f"a vocabulary of {options.vocab:,} has no room for 256 bytes and {len(options.special)} special tokens"
        )
        raise DataError(message, f"use --vocab {256 + len(options.special)} or more")
    pattern = PATTERNS[options.pattern].onig if options.pattern in PATTERNS else options.pattern
    library = Tokenizer(models.BPE())
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises no more specific exception class
        message = f"the pattern {options.pattern!r} is not a regular expression: {error}"
        raise DataError(message, f"use one of {', '.join(PATTERNS)}, or a regular expression of Oniguruma") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=ranks_wanted, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(texts, trainer)
    ranks = ranks_of(json.loads(library.to_str()), options.out)
    if len(ranks) < ranks_wanted:
        raise _too_little(options.vocab, len(ranks) + len(options.special))
    if options.out.suffix == ".tiktoken":
        return rank_file(ranks)
    return tokenizer_json(ranks, options.pattern, options.special).encode()


def _sentencepiece(options: TrainingText, texts: Iterator[str]) -> bytes:
    try:
        from sentencepiece import SentencePieceTrainer
    except ImportError:
        raise missing_package(options.out, "sentencepiece") from None
    model = io.BytesIO()
    lines = (
        line[start : start + _LINE_CHARACTERS]
        for text in texts
        for line in text.replace("\0", "").split("\n")
        for start in range(0, len(line), _LINE_CHARACTERS)
    )
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=options.vocab,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=4 * _LINE_CHARACTERS,
            required_chars="\u2581",
            user_defined_symbols=["\n"],
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        what = str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__
        message = f"SentencePiece cannot train {options.vocab:,} ids: {what}"
        raise DataError(message, "add text, or use another --vocab") from None
    return model.getvalue()


def _too_little(wanted: int, ids: int) -> DataError:
    return DataError(f"the text gives {ids:,} ids, not {wanted:,}", f"add text, or use --vocab {ids}")
