"""Tasks of `specc eval --task`, against the definitions of lm-evaluation-harness, one text at a time."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_samples import EXPERTS, make_run, model_of, small_spec, write_text

from specc.cli.app import run as command
from specc.runtime.errors import RuntimeFailure
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.eval.tasks.task import TaskResult, mean, ratio
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage.evaluations import recorded_evaluations
from specc.runtime.storage.run_directory import Run

WINDOW, BOS = 32, 256
QUESTIONS: list[dict[str, Any]] = [
    {"context": "the model", "choices": ["of a tile", "kernel", "a byte Größe"], "answer": 1},
    {"context": "spec ", "choices": ["of", "kernels and bytes"], "answer": 0},
    {"context": "", "choices": ["a", "the", "byte"], "answer": 2, "delimiter": ""},
    {"context": "the kernel of a tile, and " * 3, "choices": ["the end", "a"], "answer": 0},
]
CLOZES = [
    {"context": "the kernel of a", "target": "tile"},
    {"context": "a kernel", "target": "\n", "delimiter": ""},
    {"context": "byte " * 9, "target": "of"},
]
TEXTS = [{"text": "the spec of a kernel is a page → of the model"}, {"text": "tile"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tasks")
    return make_run(folder / "run", small_spec(), str(write_text(folder / "data")))


def written(folder: Path, lines: list[dict[str, Any]]) -> Path:
    path = folder / "task.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def result_of(run: Run, path: Path, **options: Any) -> TaskResult:
    (result,) = evaluate(run.directory, EvaluateOptions(**options), tasks=[path]).results  # type: ignore[union-attr]
    return result


def losses(tokens: list[int], scored: int) -> torch.Tensor:
    """The loss of each of the last targets, of one row without padding, cut on the left to the window."""
    model = model_of(small_spec(), fuse=False).model
    row = torch.tensor([tokens[-WINDOW - 1 :]])
    with torch.no_grad():
        return model.score(row[:, :-1], row[:, 1:])[0, -scored:].double()  # type: ignore[operator]


def likelihood(context: str, text: str) -> float:
    head = context.rstrip().encode()
    whole = (context + text).encode()
    return -float(losses([BOS, *whole], len(whole) - len(head)).sum())


@pytest.mark.parametrize("batch", [1, 3])
def test_choices(run: Run, tmp_path: Path, batch: int) -> None:
    result = result_of(run, written(tmp_path, QUESTIONS), batch=batch)
    plain, normalized, nats, sizes, tokens = [], [], 0.0, 0, 0
    for question in QUESTIONS:
        context, delimiter = question["context"], question.get("delimiter", " ")
        lls = np.array([likelihood(context, delimiter + choice) for choice in question["choices"]])
        plain.append(float(np.argmax(lls) == question["answer"]))
        normalized.append(float(np.argmax(lls / [len(c) for c in question["choices"]]) == question["answer"]))
        nats -= lls[question["answer"]]
        counts = [len((context + delimiter + c).encode()) - len(context.rstrip().encode()) for c in question["choices"]]
        sizes, tokens = sizes + counts[question["answer"]], tokens + sum(counts)
    acc = sum(plain) / 4
    assert result.measures["acc"].value == acc and result.measures["acc_norm"].value == sum(normalized) / 4
    assert result.measures["acc"].error == pytest.approx(math.sqrt(acc * (1 - acc) / 3))
    assert result.measures["bits_per_byte"].value == pytest.approx(nats / math.log(2) / sizes, rel=1e-6)
    assert (result.examples, result.tokens, result.truncated) == (4, tokens, 2)


@pytest.mark.parametrize("batch", [1, 3])
def test_cloze(run: Run, tmp_path: Path, batch: int) -> None:
    """Greedy targets are found by the most probable token of each position, among them ones with less than 1/2."""
    model = model_of(small_spec(), fuse=False).model

    def best(tokens: list[int]) -> int:
        rows = torch.tensor([[*tokens[-WINDOW:], other] for other in range(257)])
        with torch.no_grad():
            return int(model.score(rows[:, :-1], rows[:, 1:])[:, -1].argmin())  # type: ignore[operator]

    def text(context: str) -> str:
        """Two greedy characters, if they are ASCII."""
        tokens = [BOS, *context.encode()]
        for _ in range(2):
            tokens.append(best(tokens))
        return bytes(tokens[-2:]).decode() if max(tokens[-2:]) < 128 else ""

    context = next(c for c in (f"a{i} kernel" for i in range(200)) if text(c).strip())
    lines = [*CLOZES, {"context": context, "target": text(context), "delimiter": ""}]
    result = result_of(run, written(tmp_path, lines), batch=batch)
    nats, right = [], []
    for line in lines:
        end = line.get("delimiter", " ") + line["target"]
        nats.append(-likelihood(line["context"], end))
        begin, whole = len(line["context"].rstrip().encode()), [BOS, *(line["context"] + end).encode()]
        right.append(float(all(best(whole[:i]) == whole[i] for i in range(begin + 1, len(whole)))))
    assert sum(right) >= 1 and result.measures["acc"] == mean(right)
    assert result.measures["perplexity"].value == pytest.approx(math.exp(np.mean(nats)), rel=1e-5)
    error = math.exp(np.mean(nats)) * np.std(nats, ddof=1) / 2
    assert result.measures["perplexity"].error == pytest.approx(error, rel=1e-5)


def test_texts_and_text_files(run: Run, tmp_path: Path) -> None:
    result = result_of(run, written(tmp_path, TEXTS), batch=2)
    nats, sizes = [], []
    for line in TEXTS:
        tokens, total, last = [BOS, *line["text"].encode()], 0.0, 0
        while last < len(tokens) - 1:  # each target once, in windows that do not overlap but for the last
            end = min(last + WINDOW, len(tokens) - 1)
            total += float(losses(tokens[: end + 1], end - last).sum())
            last = end
        nats.append(total)
        sizes.append(len(tokens) - 1)
    bits = ratio([each / math.log(2) for each in nats], [float(size) for size in sizes])
    assert result.measures["bits_per_byte"].value == pytest.approx(bits.value, rel=1e-6)
    assert result.measures["bits_per_byte"].error == pytest.approx(bits.error, rel=1e-5)
    words = [len(line["text"].split()) for line in TEXTS]
    assert result.measures["word_perplexity"].value == pytest.approx(math.exp(sum(nats) / sum(words)), rel=1e-5)
    assert (result.tokens, result.size) == (sum(sizes), sum(sizes))
    (tmp_path / "plain.txt").write_text("<|endoftext|>\n".join(line["text"] + "\n" for line in TEXTS))
    plain = result_of(run, tmp_path / "plain.txt")
    assert plain.examples == 2 and plain.size == result.size + 2
    single = result_of(run, written(tmp_path, TEXTS[:1])).measures
    parts = [nats[0] - float(losses([BOS, *TEXTS[0]["text"].encode()], sizes[0] - WINDOW).sum())]
    over_windows = ratio([parts[0], nats[0] - parts[0]], [float(WINDOW), float(sizes[0] - WINDOW)])
    assert single["perplexity"].error == pytest.approx(over_windows.error * single["perplexity"].value, rel=1e-4)
    assert single["bits_per_byte"].error == pytest.approx(over_windows.error / math.log(2), rel=1e-4)
    assert ratio([2.0, 4.0], [1.0, 2.0]).error == 0


BAD = {
    "{": ":2: not JSON",
    '{"context": "a"}': ":2: the line has none of the keys choices, target, text",
    '{"text": "a"}': ":2: the line has the key text, but the lines before it have choices",
    '{"context": "a", "choices": ["b"], "answer": 0}': ':2: "choices" must be a list of at least two texts',
    '{"context": "a", "choices": ["b", "c"], "answer": 2}': ':2: "answer" is 2, but the choices are 0 .. 1',
    '{"context": "a", "choices": ["b", "c"]}': ':2: "answer" must be the index of a choice, but is missing',
    '{"choices": ["b", "c"], "answer": 0}': ':2: expected a string "context", but the line has no "context"',
    '{"context": "a", "choices": ["' + "b" * 40 + '", "c"], "answer": 0}': "has 41 tokens, but the context",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named(run: Run, tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + "\n" + line)
    with pytest.raises(RuntimeFailure) as caught:
        result_of(run, path)
    assert BAD[line] in caught.value.message and str(path) in caught.value.message and caught.value.hint


def test_results_are_in_the_run_and_beside_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the quantized model, and the load of experts by file."""
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run", small_spec(*EXPERTS), str(write_text(tmp_path / "data")))
    artifact = quantize(run.directory, QuantizeOptions(cache=tmp_path / "c", max_tokens=64), lambda line: None).artifact
    (tmp_path / "text.txt").write_text("of a kernel")
    files = ["--task", str(written(tmp_path, QUESTIONS)), "--task", "text.txt"]
    assert command(["eval", "run", *files, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["tasks"]
    assert [each["task"] for each in printed] == ["choices", "text"]
    assert all(abs(sum(load) - 1) < 1e-9 for each in printed for load in each["experts"].values())
    assert command(["eval", str(artifact), "--task", "text.txt"]) == 0
    assert "text.txt (text): perplexity" in capsys.readouterr().out
    recorded = {
        (each["file"], each["model"], each["step"]): each for each in recorded_evaluations(run.directory, print)
    }
    assert set(recorded) == {("task.jsonl", "run", 3), ("text.txt", "run", 3), ("text.txt", "quantized", None)}
    assert recorded["text.txt", "run", 3]["measures"] == printed[1]["measures"]
    assert command(["size", "run"]) == 0
    assert "task.jsonl (choices, run, step 3): acc 0." in capsys.readouterr().out
    assert command(["eval", "run", "--task", "nothing.jsonl"]) == 2
    assert command(["eval", "run", "--task", "text.txt", "--data", "data"]) == 2
    assert "--data does not apply to --task" in capsys.readouterr().err
