"""`specc bench` of models of pairs: the training table, decoding with a cache and without, int8 products."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_server import shell_environment
from int8_models import LSTM as INT8_MODEL
from int8_models import data_of
from pair_models import BOTH, CHARS, CROSS, EMBED, LSTM, MLP, SELF, blocks, pairs_spec
from run_samples import SPEC

from specc.cli.app import run
from specc.compiler.passes.without_cache import uncached
from specc.compiler.pipeline import lower
from specc.compiler.spec.check import load
from specc.runtime.bench import products, report_pairs, table
from specc.runtime.bench.rerun import Rerun, rerun_model
from specc.runtime.bench.table import Table, TableRow, Totals, validation_steps
from specc.runtime.data.lines.pairs import Pairs
from specc.runtime.data.tokenizers.characters import CharTokenizer
from specc.runtime.decode.lines import Translator, translator
from specc.runtime.errors import RunFailure
from specc.runtime.model.load import initialize, instantiate
from specc.runtime.support import int8_sums as sums
from specc.runtime.train.sources.source import Epoch

pytestmark = pytest.mark.usefixtures("short_passes")

ROOT = SPEC.parents[1]
LEARNED = {**EMBED, "positions": "learned"}
ADDITIVE = {"kind": "additive", "query": "lstm"}
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"encoder": [LEARNED, blocks(SELF, MLP)], "decoder": [LEARNED, blocks(SELF, CROSS, MLP)]},
    "fused": {
        "encoder": [LEARNED, blocks(SELF, MLP)],
        "decoder": [LEARNED, blocks(SELF, CROSS, MLP)],
        "fuse": [{"decoder.blocks.*.mlp": ["up", "act", "down"]}],
    },
    "attention": {
        "encoder": [EMBED, BOTH],
        "decoder": [EMBED, {**SELF, "of": "self"}, CROSS, {"kind": "concat", "beside": "embed"}, LSTM],
        "bridge": {"kind": "concat"},
    },
    "repeat": {"encoder": [EMBED, LSTM], "decoder": [{"kind": "repeat"}, LSTM], "head": {"tied": False}},
    "additive": {
        "encoder": [EMBED, BOTH],
        "decoder": [EMBED, ADDITIVE, {"kind": "concat", "beside": "embed"}, LSTM],
        "bridge": {"kind": "linear"},
    },
}
LINES = ["(7-3*z)*(-5*z-9)", "x**2", "4*(3*sin(k)-17)*sin(k)", "", "z", "(2-2*n)*(n-1)", "x**2", "n*(n-11)"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def spec_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec of a small model with int8 products."""
    train = {**data_of(INT8_MODEL)["train"], "data": {"kind": "polynomial", "lines": 60}, "steps": 100}
    path = tmp_path_factory.mktemp("specs") / "tiny_int8.yaml"
    match = {"metric": "exact_match", "lines": 20, "batch": 8, "decode": "beam", "beam": 2}
    path.write_text(json.dumps(data_of(INT8_MODEL, train=train, eval=match)))
    return path


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_without_a_cache_the_lines_are_the_same(name: str, beam: int, tmp_path: Path) -> None:
    spec = pairs_spec(**MODELS[name], init={"normal": 1.2})
    loaded = instantiate(spec, "cpu", tmp_path / "cached")
    initialize(loaded, 13)
    slow = Translator(
        Rerun(rerun_model(loaded, tmp_path / "rerun"), 30, False),
        CharTokenizer(CHARS),
        30,
        spec.model.reads_pads,
        CPU,
        5,
        beam,
    )
    result = translator(loaded.model, spec, CharTokenizer(CHARS), CPU, batch=5, beam=beam).translate(LINES)
    assert slow.translate(LINES) == result
    assert name == "repeat" or len({len(line) for line in result}) > 1  # rows end at different steps, and leave


def test_the_weights_are_shared_as_they_lie(tmp_path: Path) -> None:
    loaded = instantiate(pairs_spec(**MODELS["attention"]), "cpu", tmp_path / "cached")
    initialize(loaded, 1)
    model = rerun_model(loaded, tmp_path / "rerun")
    parameters = dict(loaded.model.named_parameters())
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(value.data_ptr() == parameters[name].data_ptr() for name, value in model.named_parameters())


def test_a_source_is_read_once_and_keys_of_it_are_made_again() -> None:
    programs = uncached(lower(pairs_spec(**MODELS["attention"]), "cpu"))
    read, write = (programs.program(name) for name in ("encode", "logits"))
    assert {node.name.split(".")[0] for node in read.nodes} == {"encoder"}
    assert {"decoder.cross.k", "decoder.cross.v"} <= {node.name for node in write.nodes}
    assert [str(type) for name, type in write.inputs if name == "inputs"] == ["i64[B,T]"]


def test_a_model_of_text_is_not_cut() -> None:
    with pytest.raises(ValueError, match="cannot be split into encoder and decoder"):
        uncached(lower(load(SPEC)[0], "cpu"))


def test_rates_are_totals_over_totals() -> None:
    train, validation = Totals(104, 79_872, 2_400_000, 8.0), Totals(13, 9_984, 300_000, 2.0)
    assert (train.steps_per_second, train.samples_per_second, train.tokens_per_second) == (13.0, 9_984.0, 300_000.0)
    # the mean of the two rates, which is not the rate of the whole, would be 9.75 steps/s
    assert train + validation == Totals(117, 89_856, 2_700_000, 10.0)
    assert (train + validation).steps_per_second == 11.7
    slow = TableRow(table.BASELINE, 1, False, train, Totals(13, 9_984, 300_000, 6.0), 1.0, 0)
    fast = TableRow(table.CACHE, 1, True, train, validation, 1.0, 0)
    assert Table((slow, fast), {}).cached_over_uncached == pytest.approx(3.0)
    assert Table((slow,), {}).cached_over_uncached is None
    assert fast.overall == train + validation


def test_validation_steps_are_those_of_an_epoch() -> None:
    def epoch(samples: int, lines: int) -> Epoch:
        return Epoch(samples, Pairs(*np.ones((2, lines, 30), np.uint8)))

    assert validation_steps(1042, 768, epoch(800_000, 100_000)) == 130  # what the published table has
    assert validation_steps(3, 768, epoch(800_000, 100_000)) == 1
    assert validation_steps(9_000, 10, epoch(80, 25)) == 2  # no line is scored twice
    with pytest.raises(RunFailure, match="a validation step has 26 lines, but only 25 are held out"):
        validation_steps(1, 26, epoch(80, 25))


def test_json_of_all_parts(
    spec_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(products, "ROWS", (1, 3))
    monkeypatch.setattr(report_pairs, "ROWS", (1, 3))
    parts = [word for part in ("step", "table", "decode", "int8") for word in ("--only", part)]
    assert run(["bench", str(spec_file), "--target", "cpu", "--steps", "6", *parts, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["step"]) == ["fuse: []"]  # the spec has no fusion points
    assert 0 < data["step"]["fuse: []"]["tokens"] < 2 * 4 * 30  # pads do not count

    rows = {row["name"]: row for row in data["table"]["rows"]}
    assert list(rows) == ["baseline", "KV cache"] and [row["cache"] for row in rows.values()] == [False, True]
    assert rows["baseline"]["train"] == rows["KV cache"]["train"]
    assert rows["baseline"]["exact"] == rows["KV cache"]["exact"]
    for row in rows.values():
        assert (row["train"]["steps"], row["train"]["samples"]) == (6, 24)
        assert (row["validation"]["steps"], row["validation"]["samples"]) == (2, 8)  # 20 held out of 60: a third
        for key in ("steps", "samples", "tokens", "seconds"):
            assert row["overall"][key] == row["train"][key] + row["validation"][key]
        for part in ("train", "validation", "overall"):
            assert row[part]["tokens_per_second"] == pytest.approx(row[part]["tokens"] / row[part]["seconds"])
    seconds = [rows[name]["validation"]["seconds"] for name in ("baseline", "KV cache")]
    assert data["table"]["cached_over_uncached"] == pytest.approx(seconds[0] / seconds[1])
    assert list(data["table"]["missing"]) == ["several GPUs", "several + cache"]

    decoded = {row["name"]: row for row in data["decode"]["rows"]}
    assert list(decoded) == [
        f"{dtype} {search}, {cache}"
        for dtype, caches in (("f32", ("cache", "no cache")), ("int8", ("cache",)))
        for search in ("greedy", "beam 2")
        for cache in caches
    ]
    assert decoded["f32 greedy, no cache"]["agreeing"] == decoded["f32 beam 2, no cache"]["agreeing"] == 1.0
    for row in decoded.values():
        assert row["lines"] == 20 and row["lines_per_second"] == pytest.approx(20e3 / row["ms"])
    assert decoded["int8 greedy, cache"]["over_uncached"] is None and not data["decode"]["trained"]

    kernels = {row["kernel"]: row for row in data["int8"]}
    assert kernels["int8_linear_f32__n32_k16"]["name"].startswith("encoder.lstm.forward_x and ")
    for row in kernels.values():
        assert list(row["times"]) == ["1", "3"] and row["refused"] == {}
        both = row["times"]["3"]
        assert row["ratio"]["3"] == pytest.approx(both["generated"]["ms"] / both["int_mm"]["ms"])


def test_tables_say_what_they_show(
    spec_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if len(x) <= 16:
            raise RuntimeError("self.size(0) needs to be greater than 16\nand more")
        return (x.double() @ w.double()).to(torch.int32)

    monkeypatch.setattr(torch, "_int_mm", refusing)
    monkeypatch.setattr(sums, "EXACT", False)  # so that ours asks the library nothing
    monkeypatch.setattr(products, "ROWS", (16, 17))
    monkeypatch.setattr(report_pairs, "ROWS", (16, 17))
    parts = [word for part in ("table", "int8") for word in ("--only", part)]
    assert run(["bench", str(spec_file), "--target", "cpu", "--steps", "1", *parts, "--at", "head.logits"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[2:])) <= 120  # the command and the names of the machine have any length
    assert "torch._int_mm does not accept M = 16: self.size(0) needs to be greater than 16" in lines
    ratio = next(line for line in lines if line.startswith("  ratio")).split()
    assert ratio[1] == "-" and float(ratio[2]) > 0
    assert sum("int8_linear" in line for line in lines) == 1  # --at
    missing = [line for line in lines if "not measured" in line]
    assert missing[0].startswith("several GPUs ") and "--gpus 2 measures two" in missing[0]


def test_an_int8_kernel_with_wrong_values_gets_no_time() -> None:
    want = torch.zeros(2, 2)
    products._require_right("int8_x", want + 1e-6, want)
    products._require_right("int8_x", want.to(torch.int8) + 1, want.to(torch.int8))
    for bad in (want + 1e-3, want.fill_(0).clone().fill_(float("nan"))):
        with pytest.raises(RunFailure, match="int8_x: the largest error is"):
            products._require_right("int8_x", bad, torch.zeros(2, 2))
    with pytest.raises(RunFailure, match="the largest error is 2, but rounding explains at most 1"):
        products._require_right("int8_x", torch.tensor([2], dtype=torch.int8), torch.tensor([0], dtype=torch.int8))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--only", "table"], 4, "table needs a model that maps lines to lines, but this is a text model"),
        (["--only", "int8"], 4, "int8 needs int8 products, but this spec has none"),
        (["--only", "step", "--gpus", "2"], 2, "--gpus applies only to table; add table to --only"),
        (["--only", "step", "--weights", "."], 2, "--weights applies only to decode; add decode to --only"),
    ],
)
def test_what_it_refuses(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(SPEC), "--target", "cpu", *arguments]) == code
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_rows_of_two_processes(spec_file: Path) -> None:
    """On the target that one process chooses too, here the spec's only one."""
    command = ["specc", "bench", str(spec_file), "--only", "table", "--gpus", "2", "--steps", "3", "--json"]
    done = subprocess.run(command, env=shell_environment(), capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["table"]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["baseline", "several GPUs", "KV cache", "several + cache"] and not result["missing"]
    assert [row["gpus"] for row in rows.values()] == [1, 2, 1, 2]
    for first, second in (("baseline", "several GPUs"), ("KV cache", "several + cache")):
        for part in ("train", "validation"):  # the same samples, shared out
            for key in ("steps", "samples", "tokens"):
                assert rows[first][part][key] == rows[second][part][key]
        assert rows[first]["exact"] == rows[second]["exact"]


@pytest.mark.gpu
def test_captured_without_a_cache(tmp_path: Path) -> None:
    spec = pairs_spec(**MODELS["attention"], init={"normal": 1.2}, dtype="f32")
    loaded = instantiate(spec.model_copy(update={"targets": ("sm80",)}), "sm80", tmp_path / "cached")
    initialize(loaded, 13)
    loaded.model.cuda()
    model, gpu = rerun_model(loaded, tmp_path / "rerun"), torch.device("cuda")
    words = CharTokenizer(CHARS), 30, spec.model.reads_pads, gpu, 300
    eager, captured = (Translator(Rerun(model, 30, how), *words) for how in (False, True))
    lines = LINES * 30
    want = eager.translate(lines)
    first, again = captured.translate(lines), captured.translate(lines)
    assert first == again
    same = sum(a == b for a, b in zip(first, want, strict=True))
    assert same > 0.95 * len(lines)  # products of other numbers of rows round otherwise


@pytest.mark.gpu
@pytest.mark.nvcc
def test_all_parts_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["train.data.lines=20000", "eval.lines=1000", "eval.batch=250"]
    words = [word for text in sizes for word in ("--set", text)]
    parts = [word for part in ("step", "table", "decode", "int8") for word in ("--only", part)]
    code = run(["bench", str(ROOT / "specs" / "poly_attn.yaml"), *words, *parts, "--steps", "5", "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    data = json.loads(printed.out)
    assert data["step"]["fuse: []"]["profile"]["classes"]["recurrent"]["ms"] > 0
    assert data["table"]["rows"][0]["name"] == "baseline"
    decoded = {row["name"]: row for row in data["decode"]["rows"]}
    assert decoded["f32 greedy, no cache"]["agreeing"] > 0.5  # untrained, and the library's LSTM computes in TF32
    assert {"int8 greedy, cache", "f32 greedy, cache"} <= decoded.keys()
    for row in data["int8"]:
        assert list(row["refused"]) == ["1", "16"]
        assert all(row["ratio"][m] for m in ("32", "128", "768", "4096", "23040"))
