"""The page of a report: every number is one of the run's files, and no text of them becomes HTML."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from report_samples import HOSTILE, trained_log, write_log
from run_samples import EXPERTS, make_run, small_spec, write_text

from specc.runtime.model_card import model_card
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.report.charts import Series, cells, curves, thinned
from specc.runtime.report.page import LIMIT
from specc.runtime.report.sampling import SampleOptions
from specc.runtime.report.write import write_report
from specc.runtime.run_facts import RunFacts
from specc.runtime.storage.evaluations import record_evaluation
from specc.runtime.storage.records import Records
from specc.runtime.storage.run_directory import Run
from specc.runtime.storage.samples import Sample, Samples, record_samples, recorded_samples

VOID = {"meta", "link", "br"}
SHORT = SampleOptions(("the ",), max_tokens=5)


class Elements(HTMLParser):
    """The elements of a page in order, with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        assert not self.open, "an element is not closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)


def page_of(run: Run, options: SampleOptions | None = None, stated: bool = False) -> str:
    return write_report(run.directory, None, options, stated, lambda line: None).read_text(encoding="utf-8")


def text_of(page: str) -> str:
    return " ".join(" ".join(Elements(page).words).split())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "data")


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    run = make_run(tmp_path_factory.mktemp("report") / "run", small_spec(), str(data))
    trained_log(run)
    cache = tmp_path_factory.mktemp("cache")
    quantize(run.directory, QuantizeOptions(max_tokens=200, cache=cache), lambda line: None)
    return run


def test_the_page_states_what_the_files_state(quantized: Run) -> None:
    record_evaluation(
        quantized.directory,
        {"file": "quiz.jsonl", "sha256": "ab" * 32, "task": "choices", "model": "run", "step": 3, "examples": 17,
         "measures": {"accuracy": {"value": 0.7321, "standard_error": 0.0456}}},
    )  # fmt: skip
    page = page_of(quantized, SHORT, stated=True)
    text = text_of(page)
    report = json.loads((quantized.directory / "quantized/report.json").read_text())
    for number in (
        "3.2109",
        "3,111",
        "3,099",
        "12.3 s",
        "Test Processor 9000",
        "Torch 2.12.7",
        "Python 3.11.5",
        "1337",
    ):
        assert number in text, number
    for fact in (quantized.spec_digest, f"{RunFacts.read(quantized.directory).count:,}"):
        assert fact in text, fact
    assert f"{report['artifact_bytes']:,} bytes" in text
    for row in report["parameters"]:
        assert f"{row['name']} {row['scheme']} {row['bits']:g} {row['mse']:.2e}" in text
        if row["output_error"] is not None:
            assert f"{row['output_error']:.3%} {row['bytes']:,} {row['compressed']:,}" in text
    assert f"{report['after']['bpb']:.4f}" in text and f"{report['before']['bpb']:.4f}" in text
    assert "quiz.jsonl (choices) accuracy 17 examples 3 0.7321 ± 0.0456" in text
    stored = recorded_samples(quantized.directory)
    assert stored is not None and stored.samples[0].prompt == "the " and stored.samples[0].text in page
    assert len(page.encode()) < LIMIT


def test_the_page_needs_nothing_else_and_runs_nothing(quantized: Run) -> None:
    page = page_of(quantized)
    elements = Elements(page).found
    assert {tag for tag, _ in elements} & {
        "script",
        "img",
        "link",
        "iframe",
        "object",
        "embed",
        "a",
        "image",
        "use",
    } == set()
    for _, attributes in elements:
        assert not any(name.startswith("on") or name in ("src", "href", "style", "xlink:href") for name in attributes)
    assert "url(" not in page and "@import" not in page
    policies = [
        a["content"] for tag, a in elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)  # well-formed


def test_the_same_files_give_the_same_page(quantized: Run) -> None:
    first = page_of(quantized, SHORT, stated=True)
    assert page_of(quantized, SHORT, stated=True) == first == page_of(quantized, SampleOptions(), stated=False)


def test_samples_are_generated_anew_for_other_options_or_weights(quantized: Run) -> None:
    record_samples(quantized.directory, Samples(step=3, max_tokens=5, temperature=0.8, samples=(
        Sample(prompt="the ", text="PLANTED", seed=0),)))  # fmt: skip
    assert "PLANTED" in page_of(quantized, SHORT, stated=True)
    assert "PLANTED" in page_of(quantized, SampleOptions(), stated=False)
    assert "PLANTED" not in page_of(quantized, SampleOptions(("of ",), max_tokens=5), stated=True)
    old = Samples(step=2, max_tokens=5, temperature=0.8, samples=(Sample(prompt="the ", text="PLANTED", seed=0),))
    record_samples(quantized.directory, old)
    assert "PLANTED" not in page_of(quantized)  # of another checkpoint
    assert "PLANTED" not in page_of(quantized, SHORT, stated=False)


def test_missing_parts_are_said_to_be_missing(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(), str(data))
    text = text_of(page_of(run))
    for sentence in (
        "The log of the run has no steps, so there are no curves.",
        "The run is not quantized",
        "The files of the run state no measured quality",
        "No samples: `specc report RUN` without --no-samples generates them",
        "machine not recorded",
        "training time not recorded",
        "digest of the training split not recorded",
    ):
        assert sentence in text, sentence
    write_log(run, {"event": "step", "step": 1, "loss": 2.0})
    text = text_of(page_of(run))
    assert "The log has no validation." in text and "does not record memory" in text


def test_damaged_files_are_named(quantized: Run, tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(), str(data))
    trained_log(run)
    with run.log.open("ab") as log:
        log.write(b'{"event": "step", "st')
    quantized_folder = run.directory / "quantized"
    (quantized_folder / "report.json").write_text("{}")
    text = text_of(page_of(run))
    assert "1 lines are not valid records" in text and "has no COMMIT file" in text and "3.2109" in text


def test_only_the_validation_of_the_checkpoint_is_final(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(), str(data))
    trained_log(run)
    *records, averaged, end = (json.loads(line) for line in run.log.read_text().splitlines())
    early = {**averaged, "step": 2, "bpb": 4.4444}

    def shown(*last: dict[str, Any]) -> tuple[str, str]:
        write_log(run, *records, early, *last)
        return text_of(page_of(run)), model_card(RunFacts.read(run.directory))

    damaged, later = {**averaged, "weights": None}, [{**record, "step": 4} for record in (averaged, end)]
    for last in ([averaged, end], [damaged, end], later, [{**averaged, "step": 4}]):
        page, card = shown(*last)
        known = last[0] is averaged
        assert ("averaged weights" in card) == ("model-index" in card) == ("3.2109" in card) == known
        assert ("bits per byte, averaged weights" in page) == known and "4.4444" not in card
        assert ("log.jsonl: the final validation is missing or damaged" in page) == (end in last and not known)


def test_hostile_text_does_not_become_html(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(), str(data))
    run = Run(run.directory, run.spec, run.target, f"/data/{HOSTILE.replace('/', '|')}", (HOSTILE,))
    run.record()
    hostile = dict.fromkeys(("name", "device", "torch", "python", "threads", "bpb", "nats", "loss", "weights"), HOSTILE)
    write_log(
        run,
        {"event": "machine", **hostile},
        {"event": "start", **hostile, "step": 0},
        {"event": "step", **hostile, "step": 1},
        {"event": "step", "step": HOSTILE, "loss": 1.0},
        {"event": "step", "step": 2, "loss": float("nan"), "lr": 1e999},
        {"event": "step", "step": 3, "loss": 2.0, "memory_bytes": HOSTILE, "tokens_per_second": [HOSTILE]},
        {"event": "validation", **hostile, "step": 3},
        {"event": "validation", "step": 3, "weights": "raw", "nats": 2.0, "tokens": HOSTILE},
        {"event": "experts", "step": 3, "weights": HOSTILE, "loads": {HOSTILE: [0.5, 0.5]}},
        {"event": "experts", "step": 3, "weights": "raw", "loads": {HOSTILE: HOSTILE}},
        {"event": "end", "complete": HOSTILE, "seconds": HOSTILE},
    )
    measures = {HOSTILE: {"value": 0.5, "standard_error": None}}
    facts = {"file": "x.jsonl", "sha256": "ab" * 32, "task": HOSTILE, "model": "run", "measures": measures}
    path = record_evaluation(run.directory, facts)
    path.write_text(json.dumps({**facts, "file": HOSTILE}))
    record_samples(run.directory, Samples(step=3, max_tokens=5, temperature=0.8, samples=(
        Sample(prompt=HOSTILE, text=HOSTILE, seed=0),)))  # fmt: skip
    page = page_of(run)
    elements = Elements(page)
    assert {tag for tag, _ in elements.found} & {"script", "img"} == set()
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    text = " ".join(elements.words)
    assert text.count("<script>alert(1)</script>") >= 8  # shown as text, and not left out
    assert "49" not in re.findall(r"\b49\b", text) and "{{ 7 * 7 }}" in text


def test_the_load_of_experts_is_shown(tmp_path: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(*EXPERTS), str(data))
    assert "The log has no loads of experts" in text_of(page_of(run))
    loads = {"blocks.0.mlp": [0.1, 0.2, 0.3, 0.4], "blocks.1.mlp": [0.25, 0.25, 0.237, 0.263]}
    write_log(run, {"event": "experts", "step": 3, "weights": "raw", "loads": loads})
    text = text_of(page_of(run))
    assert "blocks.0.mlp 10.0 20.0 30.0 40.0 blocks.1.mlp 25.0 25.0 23.7 26.3" in text
    many = {"blocks.0.mlp": [1 / 40] * 40}
    write_log(run, {"event": "experts", "step": 3, "weights": "raw", "loads": many})
    assert "expert, by load" in text_of(page_of(run))


def test_rates_are_numbers_schedules_or_formulas(tmp_path: Path, data: Path) -> None:
    rates = (
        "lr: 0.01, match: embed.*",
        "lr: {at: [[0, 0.2], [1, 0]]}, match: head.*",
        "lr: 0.02 * (1 - t), match: '*'",
    )
    optimizers = ", ".join(f"{{kind: adamw, {rate}}}" for rate in rates)
    spec = small_spec(f"train.optimizers=[{optimizers}]", "model.head.tied=false")
    run = make_run(tmp_path / "run", spec, str(data))
    write_log(run, *({"event": "step", "step": step, "loss": 2.0, "lr": 0.5} for step in (1, 2)))
    text = text_of(page_of(run))
    assert "adamw 0.01 of embed.*, adamw 0.2 at 0, 0.0 at 1, linear of head.*, adamw 0.02 * (1 - t) of *." in text


def test_each_term_of_the_loss_has_a_curve(run: Run) -> None:
    shown = text_of(page_of(run))
    assert "Term of the loss" not in shown
    with run.log.open("a") as log:
        for step, value in ((1, 7.25), (2, 3.5), ("3", 1.0), (4, None)):
            terms = {"moe.<balance>": value, "z": value}
            log.write(json.dumps({"event": "losses", "step": step, "weights": "raw", "terms": terms}) + "\n")
        log.write(json.dumps({"event": "losses", "step": 5, "weights": "raw", "terms": [1]}) + "\n")
    page = page_of(run)
    assert "Term of the loss: moe.<balance>" in text_of(page) and "moe.<balance>" not in page
    assert "Term of the loss: z" in text_of(page)


def test_the_records_of_a_resumed_run_have_each_step_once(tmp_path: Path) -> None:
    lines = [{"event": "start", "step": 0}, *({"event": "step", "step": i, "loss": float(i)} for i in (1, 2, 3, 4))]
    lines += [{"event": "start", "step": 2}, {"event": "step", "step": 3, "loss": 30.0}]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "[1]\n{}\nnot JSON\n")
    records = Records.read(path)
    assert records.series("step", "loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert records.unreadable == 3
    assert Records.read(tmp_path / "none").all == ()


def test_training_logs_the_machine_the_memory_and_the_bytes(tmp_path: Path, data: Path) -> None:
    from specc.runtime.train.train import TrainOptions, train

    spec = small_spec("train.validate_tokens=300")
    options = TrainOptions(spec, "cpu", str(data), tmp_path / "run", cache=tmp_path / "cache")
    train(options, lambda line: None)
    facts = RunFacts.read(tmp_path / "run")
    memory = [value for _, value in facts.records.series("step", "memory_bytes")]
    assert len(memory) == 3 and memory == sorted(memory) and 5e7 < memory[0] < 1e11
    assert facts.records.last("machine")["name"]
    assert facts.final_validation()[1]["piece_bytes"] in range(200, 301)
    assert facts.final_validation()[0] == "averaged weights"


def points_of(svg: str) -> list[tuple[float, float]]:
    (path,) = re.findall(r'<path d="M([^"]*)" class="line s0"/>', svg)
    return [tuple(map(float, pair.split(","))) for pair in path.split(" L")]  # type: ignore[misc]


def test_a_curve_is_where_its_axes_say() -> None:
    svg = curves("t", "step", "loss", [Series("a", [(0, 2.0), (50, 4.0), (100, 3.0)])])
    ticks = {label: float(y) for y, label in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', svg)}
    across = {
        label: float(x) for x, label in re.findall(r'<text x="([\d.]+)" y="\d+" text-anchor="middle">(\d+)<', svg)
    }
    (x0, y0), (x1, y1), (x2, y2) = points_of(svg)
    assert x0 == across["0"] and x2 == across["100"] and x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert [y0, y1, y2] == pytest.approx([ticks["2.0"] - 4, ticks["4.0"] - 4, ticks["3.0"] - 4], abs=0.2)
    assert y1 < y2 < y0  # upward is more


def test_many_curves_differ_without_color() -> None:
    svg = curves("t", "step", "loss", [Series(f"s{i}", [(0, 1.0), (1, 2.0)], marks=True) for i in range(30)])
    styles = re.findall(r'h36" class="line (s\d)"/><(\w+)([^>]*)', svg)
    shapes = {(dashes, element, re.sub(r"M?[\d.]{3,}|[xy]=\S+", "", shape)) for dashes, element, shape in styles}
    assert len(styles) == len(shapes) == 30


def test_a_wide_range_is_logarithmic_and_one_point_has_a_mark() -> None:
    svg = curves("t", "step", "loss", [Series("a", [(1, 1e-3), (2, 1e-1), (3, 10.0)])])
    ys = [y for _, y in points_of(svg)]
    assert "loss, logarithmic" in svg and ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert "<circle" in curves("t", "step", "loss", [Series("a", [(5, 1.0)])])
    assert thinned([(i, 2.0 * i) for i in range(1000)], 10)[0] == (49.5, 99.0)


def test_cells_are_shaded_by_their_value() -> None:
    svg = cells("t", ["a"], ["0", "1", "2"], {("a", "0"): 4, ("a", "1"): 6, ("a", "2"): 8}, "g", "block")
    assert re.findall(r'fill-opacity="([\d.]+)"', svg) == ["0.06", "0.31", "0.56"]
    assert re.findall(r'class="small">([^<]*)<', svg) == ["4", "6", "8"]


def test_a_page_that_is_too_large_is_refused(tmp_path: Path, data: Path) -> None:
    from specc.runtime.errors import RunFailure

    run = make_run(tmp_path / "run", small_spec(), str(data))
    record_samples(run.directory, Samples(step=3, samples=(Sample(prompt="", text="x" * LIMIT),)))
    with pytest.raises(RunFailure, match="more than 2,000,000"):
        page_of(run)
