"""A budget that the widths of the rules do not meet: what is chosen then, and that nothing is lost where none fits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from run_samples import make_run, small_spec, write_text

from specc.cli.app import run as specc
from specc.compiler.quant.gptq import Gptq
from specc.compiler.quant.round import Round
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import Allocate
from specc.runtime.artifact.artifact import peek_spec
from specc.runtime.errors import QuantizeError
from specc.runtime.open_model import read_verified
from specc.runtime.quantize.bit_allocation import allocate_bits
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage import checkpoint
from specc.runtime.storage.run_directory import Run, RunDirectoryError
from specc.runtime.submission.count import submission_size
from specc.runtime.submission.export import code_bytes, export_submission

pytestmark = pytest.mark.usefixtures("few_passes")

BLOCKS = "quant.promote=null", "quant.allocate={bits: [4, 5, 6], match: blocks.*}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("fit") / "data"))


def quantized(folder: Path, data: str, *overrides: str) -> int:
    """The bytes of random normal weights, which have the most entropy of all of their variance."""
    run = make_run(folder, small_spec(*overrides), data)
    return quantize(run.directory, QuantizeOptions(max_tokens=50), lambda _: None).size.total


def widths(run: Path) -> list[float]:
    return [
        s.bits_per_value() for n, s in read_verified(run / "quantized/model.specc").stored.schemes.items() if "." in n
    ]


def test_fewer_bits_than_the_rules_say_where_those_do_not_fit(tmp_path: Path, data: str) -> None:
    base = quantized(tmp_path / "base", data, "quant.promote=null")
    fewest = quantized(tmp_path / "fewest", data, "quant.promote=null", "quant.default.bits=4")
    budget = (base + fewest) // 2
    with pytest.raises(QuantizeError, match="bytes before any promotion; the budget is"):
        quantized(tmp_path / "promoted", data, f"quant.budget_bytes={budget}")
    assert quantized(tmp_path / "chosen", data, *BLOCKS, f"quant.budget_bytes={budget}") <= budget
    result = widths(tmp_path / "chosen")
    assert 4 in result and 5 in result


def test_coarser_steps_of_one_width_fit_too(tmp_path: Path, data: str) -> None:
    sdclip = "quant.promote=null", "quant.default={scheme: gptq, bits: 6, clip_stds: [8]}"
    base = quantized(tmp_path / "base", data, *sdclip)
    wish = "quant.allocate={bits: [6], clip_stds: [8, 11, 16], match: blocks.*}"
    budget = base - 2000
    assert budget - 500 < quantized(tmp_path / "chosen", data, *sdclip, wish, f"quant.budget_bytes={budget}") <= budget
    schemes = read_verified(tmp_path / "chosen/quantized/model.specc").stored.schemes
    clips = {scheme.clip_stds for name, scheme in schemes.items() if isinstance(scheme, Gptq) and "blocks" in name}
    assert len(clips) > 1 and clips <= {(8.0,), (11.0,), (16.0,)}


def test_a_scheme_without_such_clips_still_has_its_widths() -> None:
    asked: list[Scheme] = []

    def costs(options: Mapping[str, Sequence[Scheme]]) -> dict[str, list[float]]:
        asked.extend(scheme for schemes in options.values() for scheme in schemes)
        return {name: [-scheme.bits_per_value() for scheme in schemes] for name, schemes in options.items()}

    base = {"a": Round(bits=5), "b": Gptq(bits=5)}
    wish = Allocate(bits=(4, 6), clip_stds=(9.0, 12.0))
    allocate_bits(wish, 10**6, base, costs, lambda n, s: 1, lambda s: 1, lambda _: None)
    assert [s.bits_per_value() for s in asked if isinstance(s, Round)] == [4, 6]
    clipped = [(s.bits, s.clip_stds[0]) for s in asked if isinstance(s, Gptq)]
    assert clipped == [(4, 12.0), (4, 9.0), (6, 12.0), (6, 9.0)]


def test_two_allocations_that_take_turns_end_in_one_that_fits() -> None:
    """Compression is chaotic: here all but one of the better allocations are larger than their parts tell."""
    base: dict[str, Scheme] = {"a": Gptq(bits=5), "b": Gptq(bits=5)}
    real = {(5, 4): 150, (4, 5): 165, (5, 5): 190, (4, 4): 80}

    def bits(schemes: Mapping[str, Scheme]) -> tuple[int, int]:
        return int(schemes["a"].bits_per_value()), int(schemes["b"].bits_per_value())

    def exact(schemes: Mapping[str, Scheme]) -> int:
        return real[bits(schemes)]

    def size(name: str, scheme: Scheme) -> int:
        return {"a": {4: 40, 5: 60}, "b": {4: 40, 5: 70}}[name][int(scheme.bits_per_value())]

    def costs(options: Mapping[str, Sequence[Scheme]]) -> dict[str, list[float]]:
        weights = {"a": 3.0, "b": 4.0}
        return {name: [weights[name] * 4.0 ** -s.bits_per_value() for s in each] for name, each in options.items()}

    for budget, best in ((100, (4, 4)), (149, (4, 4)), (150, (5, 4)), (165, (4, 5)), (189, (4, 5)), (190, (5, 5))):
        chosen = allocate_bits(Allocate(bits=(4, 5)), budget, base, costs, size, exact, lambda _: None)
        assert bits(chosen) == best


def test_what_cannot_fit_leaves_the_run_and_says_how_to_go_on(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", small_spec(*BLOCKS, "quant.budget_bytes=15000"), data)
    before = sorted(path.read_bytes() for path in run.checkpoints.rglob("*") if path.is_file())
    where = str(run.directory)
    assert specc(["quantize", where, "--max-tokens", "50"]) == 4
    message = capsys.readouterr().err
    assert "bytes even with the fewest bits that quant.allocate can choose; the budget is 15,000 bytes" in message
    assert f"specc quantize {where} --set quant.KEY=VALUE" in " ".join(message.split())
    assert sorted(path.read_bytes() for path in run.checkpoints.rglob("*") if path.is_file()) == before
    assert checkpoint.latest(run.checkpoints, lambda _: None) is not None and not any(run.quantized.iterdir())

    assert specc(["quantize", where, "--max-tokens", "50", "--set", "quant.budget_bytes=24000"]) == 0
    assert submission_of(run).over is True  # its code alone is larger
    report = json.loads((run.quantized / "report.json").read_text())
    assert report["overrides"] == ["quant.budget_bytes=24000"] and report["artifact_bytes"] <= 24_000
    assert Run.open(run.directory).spec == run.spec
    assert specc(["quantize", where, "--set", "train.steps=4"]) == 2
    assert "only `quant` of its spec can be changed" in capsys.readouterr().err
    with pytest.raises(RunDirectoryError, match="can be changed"):
        run.requantized(["quant.budget_bytes=1", "model.dim=64"])
    assert specc(["quantize", where, "--set", "quant.allocate.bits=[9]"]) == 2
    capsys.readouterr()
    assert specc(["quantize", where, "--set", "quant.rules=[]", "--set", "quant.default={scheme: gptq, bits: 4}"]) == 2
    assert "S307" in (message := capsys.readouterr().err) and "add a rule" in message


def submission_of(run: Run):  # type: ignore[no-untyped-def]
    """The submission of a run, as the budget of the spec in its weights counts it."""
    export_submission(run.directory, run.directory / "submission", force=True)
    return submission_size(run.directory / "submission")


def test_room_is_left_for_the_code_of_a_submission(
    tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sized = make_run(tmp_path / "sized", small_spec(*BLOCKS, "quant.budget_bytes=999999"), data)
    budget = code_bytes(sized.directory) + 22_000  # of all at 6 bits the weights take 24,700, at 4 bits 19,000
    run = make_run(tmp_path / "run", small_spec(*BLOCKS, f"quant.budget_bytes={budget}"), data)
    where = str(run.directory)
    assert specc(["quantize", where, "--max-tokens", "50"]) == 0
    assert specc(["export", where, "--format", "submission"]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert f"code included, are over the budget of {budget:,}" in message
    assert f"specc quantize {where} --for submission" in message
    assert specc(["size", f"{where}/submission"]) == 1
    assert specc(["quantize", where, "--max-tokens", "50", "--for", "submission"]) == 0
    assert f"of code of {budget:,}" in capsys.readouterr().out
    fitting = submission_of(run)
    assert fitting.budget == budget and budget - 800 < fitting.total <= budget
    assert json.loads((run.quantized / "report.json").read_text())["reserved_bytes"] == fitting.code
    assert json.loads(peek_spec(run.quantized / "model.specc"))["quant"]["budget_bytes"] == budget
