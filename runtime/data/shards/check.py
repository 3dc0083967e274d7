"""Checks a folder of token shards. Reads all shards piece by piece, and reports their content and all problems."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from specc.compiler.errors import counted
from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.duplicates import DIGEST_BYTES, Hashes, shared
from specc.runtime.data.shards.record import RECORD, ShardRecord, read_record
from specc.runtime.data.shards.shard_file import Tokens, TokenShard, byte_counts_of, holds_byte_counts, split_of
from specc.runtime.data.split import Split
from specc.runtime.data.tokenizers.tokenizer import Tokenizer

PIECE = 4 * 1024 * 1024  # the number of tokens that are read at once
SPLITS: tuple[Split, ...] = ("val", "train")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a folder of shards. `where` is the file or the split, and `what` describes the problem. `damage` is
    True if a file is missing, damaged, or different from the record in shards.json.
    """

    where: str
    what: str
    damage: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(slots=True)
class SplitFacts:
    """The content of one split of a folder of shards.

    Attributes:
        shards: the number of shards.
        tokens: the number of tokens.
        highest: the highest token id; -1 if there are no tokens.
        bos: the number of BOS tokens; None if the BOS id is unknown.
        longest: the length of the longest document in tokens, without BOS.
        lengths: a histogram of document lengths. Key k maps to the number of documents of 2**(k-1) .. 2**k - 1 tokens,
            without BOS. Empty if BOS does not separate the documents.
        repeated: the number of documents that equal an earlier document of the split. This number is an estimate if
            there are more than `duplicates.MOST` documents.
    """

    shards: int = 0
    tokens: int = 0
    highest: int = -1
    bos: int | None = None
    longest: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    repeated: int = 0

    def histogram(self) -> list[tuple[int, int, int]]:
        bins = range(min(self.lengths, default=0), max(self.lengths, default=-1) + 1)
        return [(1 << k >> 1, (1 << k) - 1, self.lengths[k]) for k in bins]


@dataclass(slots=True)
class Checked:
    """The result of a check. `vocab` is the number of token ids, and `bos` is the BOS id. Each is None if unknown."""

    folder: Path
    vocab: int | None
    bos: int | None
    splits: dict[Split, SplitFacts] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 5 if any(finding.damage for finding in self.findings) else int(bool(self.findings))

    def report(self) -> Iterator[str]:
        """Yields the result as lines of text for people."""
        for split in reversed(SPLITS):
            content = self.splits[split]
            of = "" if self.vocab is None else f" of {self.vocab:,}"
            shards, tokens = counted(content.shards, "shard"), counted(content.tokens, "token")
            yield f"{split:<6} {shards}, {tokens}, highest {content.highest}{of}"
            if content.bos is not None and content.tokens:
                share = 100 * content.bos / content.tokens
                yield f"{'':<6} BOS ({self.bos}) {counted(content.bos, 'time')}, {share:.3f} % of the tokens"
            if content.lengths:
                count, most = content.lengths.total(), max(content.lengths.values())
                yield f"{'':<6} {counted(count, 'document')}, the longest of {counted(content.longest, 'token')}"
                for low, high, documents in content.histogram():
                    yield f"{'':<6} {low:>9,} .. {high:<10,} {documents:>12,} {'#' * -(-40 * documents // most)}"
        yield from (f"WRONG  {finding}" for finding in self.findings)
        if self.findings:
            yield f"{self.folder}: {counted(len(self.findings), 'problem')}"
        elif self.vocab is not None:
            yield f"{self.folder}: no problems"
        else:
            yield f"{self.folder}: no problems; token ids and BOS are not checked without --tokenizer"

    def facts(self) -> dict[str, object]:
        splits = {split: {**asdict(content), "lengths": content.histogram()} for split, content in self.splits.items()}
        return {**asdict(self), "folder": str(self.folder), "splits": splits}


def check(folder: Path, tokenizer: Tokenizer | None = None, progress: Progress | None = None) -> Checked:
    """Checks a folder of shards by reading every shard once.

    The check reports shards that are invalid, missing, changed, wrongly named, or equal to another shard. It also
    reports tokens outside the vocabulary, empty splits, a val split that does not start with BOS, and duplicate
    documents.

    Args:
        folder: the folder of shards.
        tokenizer: the tokenizer of the shards. If the folder has no shards.json, the check uses the vocabulary and the
            BOS id of this tokenizer.
        progress: called with the number of bytes read so far, and the total number of bytes.

    Returns:
        The content of the folder, and the problems.

    Raises:
        DataError: if the folder does not exist or has no shards, or shards.json names another tokenizer.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder", "name a folder of token shards")
    record, findings = None, []
    try:
        record = read_record(folder)
    except DataIntegrityError as error:
        what = error.message.removeprefix(f"{folder / RECORD}: ")
        findings.append(Finding(str(folder / RECORD), what, True))
    if record is not None and tokenizer is not None:
        record.require(tokenizer, folder)
    if not any(folder.glob("*.bin")) and not findings:
        raise DataError(f"{folder} has no token shards", "token shards are files whose names end in .bin")
    known = record or tokenizer
    vocab, bos = (known.vocab, known.bos) if known is not None else (None, None)
    checked = Checked(folder, vocab, bos, findings=findings)
    _Check(checked, record, progress).run()
    return checked


class _Check:
    def __init__(self, checked: Checked, record: ShardRecord | None, progress: Progress | None) -> None:
        self._checked, self._record, self._progress = checked, record, progress
        self._hashes: dict[str, str] = {}  # maps a digest of tokens to the name of the first such shard
        self._bits: dict[int, str] = {}  # maps a token width in bits to the name of the first shard with this width
        self._done = self._total = 0

    def run(self) -> None:
        paths: dict[Split | None, list[Path]] = {split: [] for split in (*SPLITS, None)}
        for path in sorted(self._checked.folder.glob("*.bin")):
            paths[split_of(path.name)].append(path)
        for path in paths[None]:
            if holds_byte_counts(path.name):
                continue  # a byte-count file is read together with its shard
            self._report(path, "this file is not read: its name contains neither train nor val")
        self._total = sum(path.stat().st_size for split in SPLITS for path in paths[split] if path.is_file())
        hashes = {split: self._split(split, paths[split]) for split in SPLITS}
        for split in SPLITS:
            if repeated := hashes[split].repeated():
                about = "about " * bool(hashes[split].level)
                self._report(split, f"{about}{repeated:,} of its documents equal an earlier document of the split")
                self._checked.splits[split].repeated = repeated
        both, exact = shared(hashes["train"], hashes["val"])
        if both:
            verb = "is" if both == 1 else "are"
            self._report("train", f"{'' if exact else 'about '}{both:,} of its documents {verb} also in val")

    def _report(self, where: str | Path, what: str, damage: bool = False) -> None:
        self._checked.findings.append(Finding(str(where), what, damage))

    def _split(self, split: Split, paths: list[Path]) -> Hashes:
        folder, record, bos = self._checked.folder, self._record, self._checked.bos
        first, hashes = len(self._checked.findings), Hashes()
        listed = record.entries(split) if record else {}
        for name in sorted(listed.keys() - {path.name for path in paths}):
            self._report(folder / name, f"missing; {RECORD} lists it", True)
        for path in paths if record else ():
            if path.name not in listed:
                self._report(path, f"not in {RECORD}", True)
        if not paths and not listed:
            self._report(folder, f"no shards of the {split} split, which training needs")
        facts = self._checked.splits[split] = SplitFacts(bos=None if bos is None else 0)
        pieces = self._pieces(split, paths, facts)
        if bos is None or (record is not None and record.marks == "none"):
            for _ in pieces:
                pass
        else:
            for documents in _documents(pieces, bos):
                hashes.add([digest for length, digest in documents if length])
                facts.lengths.update(length.bit_length() for length, _ in documents)
                facts.longest = max(facts.longest, *(length for length, _ in documents), 0)
            stated = record.splits[split].documents if record and split in record.splits else None
            count, findings = facts.lengths.total(), self._checked.findings[first:]
            if stated not in (None, count) and not any(finding.damage for finding in findings):
                self._report(split, f"{count:,} documents; {RECORD} states {stated:,}", True)
        self._byte_counts(split, paths)
        if facts.shards and not facts.tokens:
            self._report(split, "no tokens in its shards")
        return hashes

    def _byte_counts(self, split: Split, paths: list[Path]) -> None:
        counts = [(path, byte_counts_of(path)) for path in paths if byte_counts_of(path).exists()]
        total = 0
        for path, beside in counts:
            try:
                with closing(TokenShard(beside)) as file, closing(TokenShard(path)) as shard:
                    if file.tokens != shard.tokens:
                        message = f"counts the bytes of {file.tokens:,} tokens, but the shard has {shard.tokens:,}"
                        self._report(beside, message, True)
                    for start in range(0, file.tokens, PIECE):
                        total += int(file.read(start, min(PIECE, file.tokens - start)).sum(dtype=np.int64))
            except DataError as error:
                self._report(beside, error.message.removeprefix(f"{beside}: "), True)
        stated = self._record.splits[split].document_bytes if self._record and split in self._record.splits else None
        if counts and stated not in (None, total):
            self._report(split, f"byte counts of {total:,} bytes; {RECORD} states {stated:,}", True)

    def _pieces(self, split: Split, paths: list[Path], facts: SplitFacts) -> Iterator[Tokens]:
        for path in paths:
            try:
                with closing(TokenShard(path)) as shard:
                    yield from self._shard(split, shard, facts)
            except DataError as error:
                self._report(path, error.message.removeprefix(f"{path}: "), True)

    def _shard(self, split: Split, shard: TokenShard, facts: SplitFacts) -> Iterator[Tokens]:
        vocab, bos, beyond = self._checked.vocab, self._checked.bos, 0
        file, content = hashlib.sha256(shard.form.header(shard.tokens)), hashlib.sha256()
        for start in range(0, shard.tokens, PIECE):
            tokens = shard.read(start, min(PIECE, shard.tokens - start))
            for hasher in (file, content):
                hasher.update(tokens.astype(shard.form.dtype).data)
            facts.highest = max(facts.highest, int(tokens.max()))
            if vocab is not None and facts.highest >= vocab and (bad := tokens >= vocab).any():
                if not beyond:
                    first = int(np.argmax(bad))
                    place = f"token {int(tokens[first])} at byte {shard.form.file_bytes(start + first):,}"
                    self._report(shard.path, f"{place}; the tokenizer has {vocab:,} ids", True)
                beyond += int(bad.sum())
            if facts.bos is not None:
                facts.bos += int((tokens == bos).sum())
                if split == "val" and facts.tokens == start == 0 and tokens[0] != bos:
                    self._report(shard.path, f"begins with token {int(tokens[0])}, not BOS ({bos}): cannot be scored")
            yield tokens
            self._done += tokens.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)
        if beyond > 1:
            self._report(shard.path, f"{beyond:,} tokens outside of the vocabulary", True)
        facts.shards += 1
        facts.tokens += shard.tokens
        entry = self._record.entries(split).get(shard.path.name) if self._record else None
        if entry is not None and (entry.tokens, entry.sha256) != (shard.tokens, file.hexdigest()):
            self._report(shard.path, f"not the file that {RECORD} describes: its SHA-256 differs", True)
        if len(self._bits) and shard.form.bits not in self._bits:
            bits, other = next(iter(self._bits.items()))
            self._report(shard.path, f"has {shard.form.bits}-bit tokens, but {other} has {bits}-bit tokens", True)
        self._bits.setdefault(shard.form.bits, shard.path.name)
        same = self._hashes.setdefault(content.hexdigest(), shard.path.name)
        if same != shard.path.name:
            self._report(shard.path, f"has the same tokens as {same}")


def _documents(pieces: Iterable[Tokens], bos: int) -> Iterator[list[tuple[int, bytes]]]:
    """Divides a stream of tokens, given in pieces, into documents. For each piece, yields the pairs (length, digest) of
    the documents that end in the piece.

    Tokens before the first BOS are treated as a document.
    """
    hasher, length, begun = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, False
    for tokens in pieces:
        ended = []
        stored = tokens.astype(tokens.dtype.newbyteorder("<"))
        for index, part in enumerate(np.split(stored, np.flatnonzero(tokens == bos))):
            if index:  # tokens before the first BOS form a document
                if begun:
                    ended.append((length, hasher.digest()))
                hasher, length, begun = hashlib.blake2b(digest_size=DIGEST_BYTES), 0, True
                part = part[1:]
            hasher.update(part.data)
            length, begun = length + part.size, begun or part.size > 0
        yield ended
    if begun:
        yield [(length, hasher.digest())]
