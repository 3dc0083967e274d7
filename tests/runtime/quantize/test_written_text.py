"""Calibration on text that the model writes: what it is, that nothing else is read, and what the report says."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import make_run, model_of, small_spec, write_text
from torch import Tensor

from specc.compiler.build import canonical
from specc.compiler.spec.spec import Calibrate, Spec
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.decode.few_rows import step_of
from specc.runtime.decode.text import StepFunction
from specc.runtime.errors import QuantizeError, RunFailure
from specc.runtime.open_model import OpenedModel, open_model
from specc.runtime.quantize import weights, written_text
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.quantize.written_text import write_text as write_own

pytestmark = pytest.mark.usefixtures("few_passes")

CPU = torch.device("cpu")


def opened_of(spec: Spec, seed: int = 0) -> OpenedModel:
    return OpenedModel(spec, model_of(spec, seed), "run", Path("x"), CPU, None, None, ())


def wanted(**settings: Any) -> Calibrate:
    return Calibrate.model_validate({"source": "self", "sequences": 6, "batch": 4, **settings})


def test_it_depends_on_the_seed_and_the_weights_alone() -> None:
    opened = opened_of(small_spec())
    steps: list[tuple[int, int]] = []
    first = write_own(opened, wanted(), 32, 3, lambda done, total: steps.append((done, total)))
    assert first.tokens.shape == (6, 33) and steps == [(32, 32)]
    assert bool((first.tokens[:, 0] == 256).all()) and len({tuple(row) for row in first.tokens.tolist()}) == 6
    assert torch.equal(write_own(opened, wanted(), 32, 3).tokens, first.tokens)
    assert not torch.equal(write_own(opened, wanted(), 32, 4).tokens, first.tokens)
    assert not torch.equal(write_own(opened_of(small_spec(), 1), wanted(), 32, 3).tokens, first.tokens)
    windows = list(first.windows(4))
    assert [ids.shape for ids, _ in windows] == [(4, 32), (2, 32)]
    assert torch.equal(torch.cat([ids for ids, _ in windows]), first.tokens[:, :-1])
    assert torch.equal(torch.cat([targets for _, targets in windows]), first.tokens[:, 1:])


def test_it_is_written_by_the_steps_for_so_many_rows() -> None:
    opened = opened_of(small_spec())
    asked: list[int] = []

    def step(rows: int) -> StepFunction:
        asked.append(rows)
        return step_of(opened.loaded, rows)

    text = write_own(opened, wanted(), 32, 3, step=step)
    assert asked == [6] and torch.equal(text.tokens, write_own(opened, wanted(), 32, 3).tokens)


def test_its_length_temperature_and_begin_are_those_asked_for() -> None:
    opened = opened_of(small_spec())
    cold = write_own(opened, wanted(length=7, temperature=1e-6), 32, 0).tokens
    assert cold.shape == (6, 8) and len({tuple(row) for row in cold.tolist()}) == 1  # the most probable each time
    ids = cold[:1, :-1].expand(257, -1)
    with torch.no_grad():
        nats = opened.text_model.score(ids, torch.arange(257)[:, None].expand(-1, 7))
    assert torch.equal(nats.argmin(0), cold[0, 1:])
    even = write_own(opened, wanted(sequences=400, length=1, begin="uniform"), 32, 0).tokens[:, 0]
    assert int(even.min()) >= 0 and int(even.max()) < 257 and len(even.unique()) > 150


def test_draws_follow_the_model() -> None:
    """The share of each token after the first is its probability, within 4 standard deviations."""
    opened, rows = opened_of(small_spec()), 4000
    tokens = write_own(opened, wanted(sequences=rows, length=1, temperature=1.0), 32, 5).tokens[:, 1]
    with torch.no_grad():
        nats = opened.text_model.score(torch.full((257, 1), 256), torch.arange(257)[:, None])[:, 0]
    expected, counts = rows * (-nats).exp().double(), torch.bincount(tokens, minlength=257).double()
    common = expected > 5
    assert int(common.sum()) > 20
    chi_square = float(((counts - expected)[common].square() / expected[common]).sum())
    assert chi_square < int(common.sum()) + 4 * (2 * int(common.sum())) ** 0.5


def test_the_marks_that_it_wrote_are_counted() -> None:
    opened = opened_of(small_spec())
    many = write_own(opened, wanted(sequences=300, temperature=100.0), 32, 0)  # all but even
    assert many.separators == int((many.tokens[:, 1:] == 256).sum()) > 5


def test_what_it_cannot_begin_with_is_an_error() -> None:
    class Markless(ByteTokenizer):
        vocab = 256
        bos = None

    opened = opened_of(small_spec())
    opened.__dict__["tokenizer"] = Markless()
    with pytest.raises(QuantizeError, match="has no document separator, which is needed as the first token"):
        write_own(opened, wanted(), 32, 0)
    even = write_own(opened, wanted(begin="uniform"), 32, 0)
    assert even.separators == 0 and int(even.tokens.max()) < 256


@pytest.mark.parametrize("spoiled", ["embed.token", "blocks.1.mlp.down"])
def test_a_broken_model_writes_nothing(spoiled: str) -> None:
    opened = opened_of(small_spec())
    with torch.no_grad():
        opened.model.get_parameter(spoiled).fill_(math.nan)
    with pytest.raises(RunFailure, match="the logits contain NaN"):
        write_own(opened, wanted(), 32, 0)


SELF = "quant.calibrate={source: self, sequences: 6, batch: 4, length: 20}"


def seen_by_hessians(run: Path, options: QuantizeOptions) -> tuple[list[Tensor], dict[str, Any], list[str]]:
    """The rows that the Hessians were made of, the report, and what was said."""
    rows: list[Tensor] = []
    real = weights.capture_hessians

    def capture(model: Any, windows: Any, *rest: Any) -> Any:
        batches = list(windows)
        rows.extend(ids for ids, _ in batches)
        return real(model, iter(batches), *rest)

    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "capture_hessians", capture)
        quantize(run, options, said.append)
    return rows, json.loads((run / "quantized" / "report.json").read_text()), said


def test_quantize_calibrates_on_what_the_model_writes(tmp_path: Path) -> None:
    data = write_text(tmp_path / "data")
    options = QuantizeOptions(cache=tmp_path / "cache", max_tokens=200)
    run = make_run(tmp_path / "run", small_spec(SELF), str(data))
    (data / "train.txt").unlink()  # it needs none of it
    rows, report, said = seen_by_hessians(run.directory, options)
    written = write_own(open_model(run.directory), run.spec.quant.calibrate, 32, run.spec.train.seed)  # type: ignore[union-attr]
    assert torch.equal(torch.cat(rows), written.tokens[:, :-1])
    how = {"source": "self", "sequences": 6, "seed": 1337, "length": 20, "temperature": 0.8, "begin": "bos"}
    assert report["calibration"] == {**how, "start_tokens": written.separators}
    assert said[1].startswith("generated 120 calibration tokens in ") and said[2].startswith("calibrated in ")
    before = (run.quantized / "model.specc").read_bytes()
    quantize(run.directory, options, lambda _: None)
    assert (run.quantized / "model.specc").read_bytes() == before


def test_on_training_text_the_report_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", small_spec(), str(write_text(tmp_path / "data")))
    rows, report, said = seen_by_hessians(run.directory, QuantizeOptions(cache=tmp_path / "cache", max_tokens=200))
    assert [len(ids) for ids in rows] == [4, 2]
    assert report["calibration"] == {"source": "train", "sequences": 6, "seed": 1337}
    assert not any(line.startswith("wrote") for line in said)


def test_bits_are_allocated_by_its_gradients_too(tmp_path: Path) -> None:
    settings = ("quant.promote=null", "quant.allocate={bits: [4, 6]}", "quant.budget_bytes=22000", SELF)
    run = make_run(tmp_path / "run", small_spec(*settings), str(write_text(tmp_path / "data")))
    result = quantize(run.directory, QuantizeOptions(cache=tmp_path / "cache", max_tokens=200), lambda _: None)
    assert result.size.total <= 22000 and all(row.added_nats is not None for row in result.rows if row.bits in (4, 6))


def test_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(written_text, "decoder_of", full)
    with pytest.raises(RunFailure, match="out of GPU memory while generating") as caught:
        write_own(opened_of(small_spec()), wanted(), 32, 0)
    assert "sequences" in (caught.value.hint or "")


def test_a_spec_that_does_not_use_it_keeps_its_text() -> None:
    plain, by_itself = small_spec(), small_spec(SELF)
    assert '"source"' not in canonical(plain) and '"temperature"' not in canonical(plain)
    assert '"source":"self"' in canonical(by_itself).replace(" ", "")


@pytest.mark.parametrize("source", ["self", "train"])
def test_inputs_of_products_in_whole_numbers_are_measured_on_it(source: str, tmp_path: Path) -> None:
    """Their scales are those of the rows that were calibrated on, so the loss stays near that of the weights."""
    settings = (
        "quant.promote=null",
        "quant.default={scheme: int8}",
        f"quant.calibrate={{source: {source}, sequences: 6, batch: 4}}",
    )
    run = make_run(tmp_path / "run", small_spec(*settings), str(write_text(tmp_path / "data")))
    result = quantize(run.directory, QuantizeOptions(cache=tmp_path / "cache", max_tokens=200), lambda _: None)
    assert result.calibration is not None and result.calibration["source"] == source
    assert abs(result.after.nats - result.before.nats) / result.before.tokens < 0.05
