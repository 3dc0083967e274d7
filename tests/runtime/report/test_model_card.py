"""The model card: every number in it is one of the run's files, and the hub's own library reads it."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_samples import HOSTILE, trained_log, write_log
from run_samples import make_run, small_spec, write_text

from specc.compiler.spec.check import load
from specc.runtime.hugging_face.exporting import ExportFolderError, ExportOptions, export_folder
from specc.runtime.model_card import CARD, model_card
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.report.write import write_card
from specc.runtime.run_facts import RunFacts
from specc.runtime.storage import committed
from specc.runtime.storage.evaluations import record_evaluation
from specc.runtime.storage.run_directory import Run

TASK = {
    "file": "quiz.jsonl",
    "sha256": "ab" * 32,
    "task": "choices",
    "model": "run",
    "step": 3,
    "examples": 17,
    "measures": {"accuracy": {"value": 0.7321, "standard_error": 0.0456}},
}
# A llama, so that Transformers has a family for the run; its `hf` folder needs one.
LLAMA = (
    "model.blocks.layers=[{kind: attention, heads: 4, kv_heads: 2, rope: {base: 10000}}, "
    "{kind: mlp, hidden: 48, act: silu(gate) * x}]",
    "model.embed=[{kind: token}]",
    "model.blocks.norm={kind: rms, weight: w}",
    "model.norm={kind: rms, weight: w}",
    "model.head={tied: true}",
    "model.init={uniform: 0.1}",
    "quant=null",
    "fuse=[]",
    'train.optimizers=[{kind: adamw, match: "*", lr: 0.01}]',
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "data")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    run = make_run(tmp_path_factory.mktemp("card") / "run", small_spec("quant.budget_bytes=900000"), str(data))
    quantize(run.directory, QuantizeOptions(max_tokens=200, cache=tmp_path_factory.mktemp("cache")), lambda line: None)
    return run


@pytest.fixture(autouse=True)
def _log(run: Run) -> None:
    trained_log(run)
    record_evaluation(run.directory, TASK)


def card_of(run: Run) -> str:
    return write_card(run.directory, None).read_text(encoding="utf-8")


def test_the_hub_reads_the_results(run: Run) -> None:
    cards = pytest.importorskip("huggingface_hub", reason="it comes with transformers")
    card_of(run)
    card = cards.ModelCard.load(run.directory / CARD)
    assert card.data.library_name == "specc" and card.data.pipeline_tag == "text-generation"
    results = {(r.metric_name, r.dataset_type): r for r in card.data.eval_results}
    report = json.loads((run.quantized / "report.json").read_text())
    bpb = results["bits per byte, averaged weights", "validation split"]
    assert bpb.metric_value == 3.2109 and bpb.dataset_name == "validation split, 3,111 tokens, 3,099 bytes"
    quantized = next(r for (name, _), r in results.items() if name == "bits per byte, quantized")
    assert quantized.metric_value == report["after"]["bpb"]
    assert results["accuracy, final weights", "quiz.jsonl (choices)"].metric_value == 0.7321
    assert {r.task_type for r in results.values()} == {"text-generation"}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of the numbers in a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def changed(value: Any, path: tuple[Any, ...]) -> Any:
    """A copy of a JSON value with another number at a path."""
    value = json.loads(json.dumps(value))
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = inner[path[-1]] + 1
    return value


def records_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.log.read_text().splitlines()]


def test_each_number_of_the_log_reaches_the_card(run: Run) -> None:
    """The card changes with each number of the records that it states, and with no other."""
    before, records = card_of(run), records_of(run)
    stated, others = set(), set()
    for path in leaves(records):
        write_log(run, *changed(records, path))
        event = records[path[0]]["event"]
        (stated if card_of(run) != before else others).add((event, records[path[0]].get("weights"), path[1]))
    assert stated == {
        ("start", None, "threads"),
        ("validation", "average", "nats"),
        ("validation", "average", "tokens"),
        ("validation", "average", "bpb"),
        ("validation", "average", "document_bytes"),
        ("validation", "average", "step"),
        ("end", "average", "seconds"),
        ("start", None, "processes"),
    }
    assert {event for event, *_ in others - stated} >= {"step", "machine"}


def test_each_number_of_the_quantization_and_of_tasks_reaches_the_card(run: Run, tmp_path: Path) -> None:
    before, report = card_of(run), json.loads((run.quantized / "report.json").read_text())
    artifact = (run.quantized / "model.specc").read_bytes()
    stated = set()
    for path in leaves({key: value for key, value in report.items() if key not in ("parameters", "calibration")}):
        content = json.dumps(changed(report, path)).encode()
        committed.discard(run.quantized)
        committed.write(run.quantized, (("report.json", [content]), ("model.specc", [artifact])))
        if card_of(run) != before:
            stated.add(path)
    each = {(when, key) for when in ("before", "after") for key in ("nats", "tokens", "bpb", "piece_bytes")}
    assert stated == {("step",), ("artifact_bytes",), ("budget_bytes",)} | each
    committed.discard(run.quantized)
    content = json.dumps(report).encode()
    committed.write(run.quantized, (("report.json", [content]), ("model.specc", [artifact])))
    pairs = ((0.7322, 0.0456), (0.7321, 0.0457))
    measures = ({"accuracy": {"value": value, "standard_error": error}} for value, error in pairs)
    for change in ({"examples": 18}, {"step": 4}, *({"measures": measure} for measure in measures)):
        record_evaluation(run.directory, {**TASK, **change})
        assert card_of(run) != before, change
        assert ("accuracy, final weights" in card_of(run)) == (change.get("step", 3) == 3)  # the step of the checkpoint


@pytest.mark.parametrize(
    "change",
    [
        lambda run: Run(run.directory, run.spec, run.target, "/elsewhere/other", run.overrides),
        lambda run: Run(run.directory, run.spec, run.target, run.data, ("train.steps=3",)),
    ],
)
def test_the_data_and_the_overrides_reach_the_card(run: Run, change: Callable[[Run], Run]) -> None:
    before = card_of(run)
    change(run).record()
    assert card_of(run) != before
    run.record()


def test_the_spec_in_the_card_is_that_of_the_run(run: Run, tmp_path: Path) -> None:
    """The command of the card starts from it."""
    (text,) = re.findall(r"```json\n(.*?)\n```", card_of(run), re.DOTALL)
    path = tmp_path / "spec.json"
    path.write_text(text)
    assert load(path)[0] == run.spec
    assert run.spec_digest in card_of(run)


def test_hostile_names_stay_text(run: Run) -> None:
    hostile = Run(run.directory, run.spec, run.target, "data", (f"`x` | y {HOSTILE}\n---\nlicense: mit",))
    hostile.record()
    card = card_of(run)
    run.record()
    body = re.sub(r"```.*?```", "", card, flags=re.DOTALL)
    assert "<script" not in body and "<img" not in body
    assert "\\`x\\` \\| y" in body
    assert "\nlicense: mit" not in card


def test_a_run_without_files_says_so(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(), str(data))
    card = card_of(run)
    assert "state no measured quality" in card and "not quantized" in card and "model-index" not in card


def test_a_folder_of_transformers_has_a_card(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(*LLAMA), str(data))
    trained_log(run)
    out = export_folder(run.directory, ExportOptions(tmp_path / "hf"), lambda line: None)
    card = (out / CARD).read_text()
    assert "library_name: transformers" in card and "3.2109" in card
    size = (out / "model.safetensors").stat().st_size
    assert f"`model.safetensors`: {size:,} bytes" in card
    export_folder(run.directory, ExportOptions(tmp_path / "hf", force=True), lambda line: None)  # a card is no stranger
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportFolderError, match=r"notes\.txt"):
        export_folder(run.directory, ExportOptions(tmp_path / "hf", force=True), lambda line: None)
    assert model_card(RunFacts.read(run.directory)) != card
