"""Best-fit packing against a plain loop, and its batches on any number of ranks, after a resume and in a run."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from run_samples import small_spec

from specc.runtime.data.errors import DataError
from specc.runtime.data.shards.shard_file import ShardWriter
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.data.windows.loader import Loader
from specc.runtime.data.windows.packing import best_fit
from specc.runtime.data.windows.stream import TokenStream, open_stream
from specc.runtime.train.train import TrainOptions, train

BOS = 256


def plain(documents: list[list[int]], capacity: int, buffer: int) -> tuple[list[list[int]], int]:
    """The rows, and the tokens left out: the buffer is a list in order of arrival, which each choice walks through."""
    coming, waiting, rows, cropped = list(documents), [], [], 0
    while True:
        row: list[int] = []
        lost = 0
        while len(row) < capacity:
            while coming and len(waiting) < buffer:
                waiting.append(coming.pop(0))
            if not waiting:
                return rows, cropped
            best = None
            for index, document in enumerate(waiting):
                fits = len(document) <= capacity - len(row)
                if fits and (best is None or len(document) > len(waiting[best])):
                    best = index
            if best is None:
                best = min(range(len(waiting)), key=lambda index: len(waiting[index]))
            document = waiting.pop(best)
            lost = max(0, len(document) - (capacity - len(row)))
            row += document[: capacity - len(row)]
        rows.append(row)
        cropped += lost


def random_documents(seed: int, count: int, longest: int) -> list[list[int]]:
    generator = random.Random(seed)
    sizes = [int(longest ** generator.random()) for _ in range(count)]
    return [[BOS, *(generator.randrange(256) for _ in range(size - 1))] for size in sizes]


@pytest.mark.parametrize(("capacity", "buffer", "longest"), [(33, 5, 60), (64, 50, 150), (17, 1, 100), (129, 999, 300)])
def test_rows_are_those_of_a_plain_loop(capacity: int, buffer: int, longest: int) -> None:
    documents = random_documents(capacity, 400, longest)
    rows, cropped = plain(documents, capacity, buffer)
    packed = list(best_fit(((index, len(document)) for index, document in enumerate(documents)), capacity, buffer))
    assert [[t for index, count in row.parts for t in documents[index][:count]] for row in packed] == rows
    assert sum(row.cropped for row in packed) == cropped > 0
    used = [index for row in packed for index, _ in row.parts]
    assert len(used) == len(set(used)) and all(row[0] == BOS and len(row) == capacity for row in rows)


def stream_of(folder: Path, documents: list[list[int]]) -> TokenStream:
    tokens = np.concatenate([np.array(document) for document in documents])
    folder.mkdir(exist_ok=True)
    for index, part in enumerate(np.array_split(tokens, 3)):
        with ShardWriter(folder / f"x_train_{index:06d}.bin") as writer:
            writer.write(part)
    return open_stream(folder, "train", ByteTokenizer(), folder)


def loader(stream: TokenStream, rows: int, rank: int = 0, world: int = 1) -> Loader:
    return Loader(stream, rows, 32, "best_fit", 5, rank, world, bos=BOS)


def test_batches_are_the_rows_on_any_number_of_ranks_and_after_a_resume(tmp_path: Path) -> None:
    documents = random_documents(3, 300, 90)
    stream = stream_of(tmp_path / "shards", documents)
    rows, cropped = plain(documents, 33, 1000)
    steps = len(rows) // 4 + 3  # into the second epoch
    with loader(stream, 4) as reader:
        batches = [reader.next() for _ in range(steps)]
        share = reader.cropped_share()
    read = np.concatenate([np.concatenate([ids, targets[:, -1:]], 1) for ids, targets in batches])
    np.testing.assert_array_equal(read[: len(rows)], rows)
    assert (read[:, 0] == BOS).all() and not np.array_equal(read[len(rows) :], rows[: len(read) - len(rows)])
    assert share == pytest.approx(cropped / sum(map(len, documents)), rel=0.2)
    ranks = [loader(stream, 2, rank, 2) for rank in range(2)]
    for step, (ids, _) in enumerate(batches):
        parts = [reader.next()[0] for reader in ranks]
        np.testing.assert_array_equal(np.stack(parts, 1).reshape(4, 32), ids)
        if step == 7:
            state = json.loads(json.dumps(ranks[0].state()))
            for reader in ranks:
                reader.close()
            ranks = [loader(stream, 2, rank, 2) for rank in range(2)]
            for reader in ranks:
                reader.restore(state)
    for reader in ranks:
        reader.close()
    with Loader(stream, 4, 32, "sequential", 5) as other, pytest.raises(DataError, match="the difference is in order"):
        other.restore(state)


def test_a_stream_without_documents_is_refused(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, [[1] * 200])
    with loader(stream, 4) as reader, pytest.raises(DataError, match="of the stream have fewer than 33 tokens"):
        reader.next()


def test_a_run_on_packed_rows_reports_what_was_left_out(tmp_path: Path) -> None:
    documents = [bytes(document[1:]) * 30 for document in random_documents(4, 200, 40) if len(document) > 9]
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_bytes(b"\n<|endoftext|>\n".join(d.replace(b"\n", b" ") for d in documents))
    spec, said = small_spec("train.data={tokenizer: bytes, order: best_fit}"), []
    options = TrainOptions(
        spec, "cpu", str(tmp_path), tmp_path / "run", stop_after_steps=2, cache=tmp_path / "cache", compiled=False
    )
    train(options, said.append)
    assert any("packing left out" in line for line in said)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert 0 < log[-1]["cropped_share"] < 1
