"""Checks a folder of token shards: reads it in pieces, and reports its content and all problems."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specc.runtime.data.errors import DataError, DataIntegrityError
from specc.runtime.data.shards.duplicates import DIGEST_BYTES, Hashes, shared
from specc.runtime.data.shards.record import RECORD, ShardEntry, ShardRecord, read_record
from specc.runtime.data.shards.shard_file import TokenShard, find_shards, header_of, shard_offset, split_of
from specc.runtime.data.split import Split
from specc.runtime.data.tokenizers.tokenizer import Tokenizer

PIECE = 4 * 1024 * 1024  # tokens that are read at once
SPLITS: tuple[Split, ...] = ("val", "train")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem. `damage` is whether a file is missing, damaged, or not the file that the record describes."""

    where: str
    what: str
    damage: bool

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(slots=True)
class SplitFacts:
    """The content of a split.

    Attributes:
        shards: number of shards.
        tokens: number of tokens.
        highest: the highest token id; -1 if there are no tokens.
        marks: number of BOS tokens; None if the id of BOS is unknown.
        longest: length of the longest document in tokens, without BOS.
        lengths: histogram of document lengths in tokens, without BOS, i64 [65]. Bin k counts lengths 2**(k-1) ..
            2**k - 1. None if documents are not separated by BOS.
        repeated: number of documents that equal an earlier document of the split; an estimate for very many documents.
    """

    shards: int = 0
    tokens: int = 0
    highest: int = -1
    marks: int | None = None
    longest: int = 0
    lengths: npt.NDArray[np.int64] | None = None
    repeated: int = 0

    def histogram(self) -> list[tuple[int, int, int]]:
        """Returns the bins as (shortest, longest, documents), without empty bins at both ends."""
        if self.lengths is None or not self.lengths.any():
            return []
        filled = np.flatnonzero(self.lengths)
        return [
            (1 << k >> 1, max((1 << k) - 1, 0), int(self.lengths[k]))
            for k in range(int(filled[0]), int(filled[-1]) + 1)
        ]


@dataclass(slots=True)
class Checked:
    """The result of a check: facts by split, and problems. `vocab` and `bos` are None if unknown."""

    folder: Path
    vocab: int | None
    bos: int | None
    splits: dict[Split, SplitFacts] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 5 if any(finding.damage for finding in self.findings) else int(bool(self.findings))

    def report(self) -> Iterator[str]:
        """Yields human-readable lines."""
        for split in ("train", "val"):
            if (content := self.splits.get(split)) is None:
                continue
            of = "" if self.vocab is None else f" of {self.vocab:,}"
            yield f"{split:<6} {content.shards:,} shards, {content.tokens:,} tokens, highest {content.highest}{of}"
            if content.marks is not None and content.tokens:
                share = 100 * content.marks / content.tokens
                yield f"{'':<6} BOS ({self.bos}) {content.marks:,} times, {share:.3f} % of the tokens"
            rows = content.histogram()
            if rows:
                count = sum(row[2] for row in rows)
                yield f"{'':<6} {count:,} documents, the longest of {content.longest:,} tokens"
                most = max(row[2] for row in rows)
                for low, high, documents in rows:
                    yield f"{'':<6} {low:>9,} .. {high:<10,} {documents:>12,} {'#' * -(-40 * documents // most)}"
        yield from (f"WRONG  {finding}" for finding in self.findings)
        known = self.vocab is not None
        yield f"{self.folder}: " + (
            f"{len(self.findings)} found wrong"
            if self.findings
            else "sound"
            if known
            else "sound, as far as it goes without --tokenizer"
        )

    def facts(self) -> dict[str, object]:
        """Returns the result as fields for JSON output."""
        splits = {
            split: {
                "shards": content.shards,
                "tokens": content.tokens,
                "highest": content.highest,
                "bos": content.marks,
                "longest": content.longest,
                "lengths": [list(row) for row in content.histogram()],
                "repeated": content.repeated,
            }
            for split, content in self.splits.items()
        }
        findings = [{"where": f.where, "what": f.what, "damage": f.damage} for f in self.findings]
        return {
            "folder": str(self.folder),
            "vocab": self.vocab,
            "bos": self.bos,
            "splits": splits,
            "findings": findings,
        }


def check(folder: Path, tokenizer: Tokenizer | None = None, progress: Progress | None = None) -> Checked:
    """Checks a folder of shards by reading all of it once.

    These problems are reported: invalid or truncated shards, tokens that are not in the vocabulary, missing files,
    files that do not match the record, files whose names contain neither train nor val, a split without shards or
    tokens, val not starting with BOS, two shards with equal tokens, duplicate documents within a split, and documents
    of train that are also in val.

    Args:
        folder: the folder.
        tokenizer: determines the vocabulary and BOS if there is no record.
        progress: called with the number of tokens read and the total.

    Returns:
        The facts and the problems.

    Raises:
        DataError: the folder does not exist or has no shards, or the record belongs to another tokenizer.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder", "name a folder of token shards")
    record, findings = None, []
    try:
        record = read_record(folder)
    except DataIntegrityError as error:
        what = error.message.removeprefix(f"{folder / RECORD}: ").removeprefix(f"{folder}: ")
        findings.append(Finding(str(folder / RECORD), what, True))
    if record is not None and tokenizer is not None:
        record.require(tokenizer, folder)
    vocab = record.vocab if record else tokenizer.vocab if tokenizer else None
    bos = record.bos if record else tokenizer.bos if tokenizer else None
    checked = Checked(folder, vocab, bos, findings=findings)
    if not any(folder.glob("*.bin")) and not findings:
        raise DataError(f"{folder}: no token shards in this folder", "their names end in .bin")
    _Check(checked, record, progress).run()
    return checked


class _Check:
    def __init__(self, checked: Checked, record: ShardRecord | None, progress: Progress | None) -> None:
        self._checked, self._record, self._progress = checked, record, progress
        self._marked = checked.bos is not None and (record is None or record.marks == "document")
        self._hashes: dict[str, str] = {}  # digest of a shard's tokens -> name of the first such shard
        self._documents = {split: Hashes() for split in SPLITS}
        self._done = 0

    def run(self) -> None:
        paths = {split: self._paths(split) for split in SPLITS}
        for path in sorted(self._checked.folder.glob("*.bin")):
            if split_of(path.name) is None:
                self._wrong(path, "nothing reads it: its name says neither train nor val")
        total = sum(path.stat().st_size // 2 for some in paths.values() for path in some if path.is_file())
        for split in SPLITS:
            self._split(split, paths[split], total)
        for split, hashes in self._documents.items():
            if repeated := hashes.repeated():
                about = "about " * bool(hashes.level)
                self._wrong(split, f"{about}{repeated:,} of its documents are equal to an earlier one of them")
                self._checked.splits[split].repeated = repeated
        both, exact = shared(self._documents["train"], self._documents["val"])
        if both:
            self._wrong("train", f"{'' if exact else 'about '}{both:,} of its documents are in val too")

    def _wrong(self, where: str | Path, what: str, damage: bool = False) -> None:
        self._checked.findings.append(Finding(str(where), what, damage))

    def _paths(self, split: Split) -> list[Path]:
        folder, listed = self._checked.folder, self._record.entries(split) if self._record else {}
        try:
            paths = find_shards(folder, split) or []
        except DataError:  # there are shards, but none of this split
            paths = []
        if self._record:
            for name in sorted(listed.keys() - {path.name for path in paths}):
                self._wrong(folder / name, f"missing; {RECORD} lists it", True)
            for path in paths:
                if path.name not in listed:
                    self._wrong(path, f"not in {RECORD}", True)
        if not paths and not listed:
            self._wrong(folder, f"no shards of the {split} split, which training needs")
        return paths

    def _split(self, split: Split, paths: list[Path], total: int) -> None:
        facts = SplitFacts(marks=None if self._checked.bos is None else 0)
        self._checked.splits[split] = facts
        documents = _Documents(self._checked.bos) if self._marked and self._checked.bos is not None else None
        listed = self._record.entries(split) if self._record else {}
        for path in paths:
            try:
                shard = TokenShard(path)
            except DataError as error:
                self._wrong(path, error.message.removeprefix(f"{path}: "), True)
                continue
            try:
                self._shard(split, facts, shard, listed.get(path.name), documents, total)
            except DataIntegrityError as error:
                self._wrong(path, error.message.removeprefix(f"{path}: "), True)
            finally:
                shard.close()
        if facts.shards and not facts.tokens:
            self._wrong(split, "no tokens in its shards")
        if documents is not None:
            self._documents[split].add(documents.end())
            facts.lengths, facts.longest = documents.lengths, documents.longest
            entry = self._record.splits.get(split) if self._record else None
            count = int(documents.lengths.sum())
            damaged = any(finding.damage for finding in self._checked.findings)
            if not damaged and entry is not None and entry.documents not in (None, count):
                self._wrong(split, f"{count:,} documents; {RECORD} says {entry.documents:,}", True)

    def _shard(
        self,
        split: Split,
        facts: SplitFacts,
        shard: TokenShard,
        entry: ShardEntry | None,
        documents: _Documents | None,
        total: int,
    ) -> None:
        vocab, bos, beyond = self._checked.vocab, self._checked.bos, 0
        file, content = hashlib.sha256(header_of(shard.tokens)), hashlib.sha256()
        for start in range(0, shard.tokens, PIECE):
            tokens = shard.read(start, min(PIECE, shard.tokens - start))
            for hasher in (file, content):
                hasher.update(tokens.astype("<u2").data)
            facts.highest = max(facts.highest, int(tokens.max()))
            if vocab is not None and facts.highest >= vocab and (bad := tokens >= vocab).any():
                if not beyond:
                    first = int(np.argmax(bad))
                    byte = shard_offset(start + first)
                    what = f"token {int(tokens[first])} at byte {byte:,}; the tokenizer has {vocab:,} ids"
                    self._wrong(shard.path, what, True)
                beyond += int(bad.sum())
            if bos is not None:
                facts.marks = (facts.marks or 0) + int((tokens == bos).sum())
                if split == "val" and facts.tokens == 0 and start == 0 and tokens[0] != bos:
                    self._wrong(shard.path, f"begins with token {int(tokens[0])}, not BOS ({bos}): cannot be scored")
            if documents is not None:
                self._documents[split].add(documents.add(tokens))
            self._done += len(tokens)
            if self._progress is not None:
                self._progress(self._done, total)
        if beyond > 1:
            self._wrong(shard.path, f"{beyond:,} such tokens in all", True)
        facts.shards += 1
        facts.tokens += shard.tokens
        if entry is not None and (entry.tokens, entry.sha256) != (shard.tokens, file.hexdigest()):
            self._wrong(shard.path, f"not the file that {RECORD} describes: its SHA-256 differs", True)
        first_of = self._hashes.setdefault(content.hexdigest(), shard.path.name)
        if first_of != shard.path.name:
            self._wrong(shard.path, f"holds the same tokens as {first_of}")


class _Documents:
    """Divides a stream of tokens into documents at BOS, and computes their lengths and digests.

    Tokens before the first BOS count as a document. Empty documents have no digest.
    """

    def __init__(self, bos: int) -> None:
        self._bos = bos
        self._begun = False
        self._length = 0
        self._hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self.lengths = np.zeros(65, np.int64)
        self.longest = 0

    def add(self, tokens: npt.NDArray[np.uint16]) -> list[bytes]:
        """Adds tokens and returns the digests of the documents that end in them."""
        digests: list[bytes] = []
        start = 0
        for mark in np.flatnonzero(tokens == self._bos).tolist():
            self._feed(tokens[start:mark])
            digests += self.end()
            self._begun = True
            start = mark + 1
        self._feed(tokens[start:])
        return digests

    def _feed(self, part: npt.NDArray[np.uint16]) -> None:
        if part.size:
            self._hasher.update(part.astype("<u2").data)
            self._length += part.size
            self._begun = True

    def end(self) -> list[bytes]:
        """Ends the current document, if any, and returns its digest in a list, which is empty without a digest."""
        if not self._begun:
            return []
        length, digest = self._length, self._hasher.digest()
        self.lengths[length.bit_length()] += 1
        self.longest = max(self.longest, length)
        self._begun, self._length, self._hasher = False, 0, hashlib.blake2b(digest_size=DIGEST_BYTES)
        return [digest] if length else []
