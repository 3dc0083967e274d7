"""Submissions: train_gpt.py runs where there is only torch, and does what specc does, to the last bit."""

import ast
import json
import re
import shutil
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import make_run, small_spec, write_text
from submissions import ALONE, Submission, alone, ended, only_torch, started, write_shards

from specc.cli.app import run as specc
from specc.compiler.spec import check
from specc.runtime.artifact.codecs import Codec
from specc.runtime.data.shards.pack import PackOptions, pack
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.errors import ExportError, IntegrityError, RunFailure
from specc.runtime.eval.evaluate import evaluate
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.export.size import size
from specc.runtime.model.load import TargetError
from specc.runtime.quantize.pipeline import QuantizeOptions, quantize
from specc.runtime.storage.run_directory import Run
from specc.runtime.submission import bundle
from specc.runtime.submission.count import submission_size
from specc.runtime.submission.export import export_submission, requirements
from specc.runtime.submission.names import CODE, WEIGHTS
from specc.runtime.train.train import TrainOptions, train


def test_it_scores_where_there_is_only_torch(submission: Submission) -> None:
    """The very nats of `specc eval`, of the submission's weights and of the run's artifact."""
    done = alone(submission, submission.folder, "score", "--data", str(submission.shards))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    for path in (submission.folder / WEIGHTS, submission.run.quantized / "model.specc"):
        result = evaluate(path, EvaluateOptions(str(submission.shards)))
        assert facts == result.facts()
    less = alone(
        submission,
        submission.folder,
        "score",
        str(submission.folder / WEIGHTS),
        "--data",
        str(submission.shards),
        "--max-tokens",
        "50",
    )
    assert json.loads(less.stdout)["tokens"] == 50


def test_it_trains_quantizes_and_writes_what_specc_does(submission: Submission, tmp_path: Path) -> None:
    """All steps of the run with its rounding and averaging, calibration and promotion: the same file."""
    shutil.copy(submission.folder / CODE, tmp_path)
    done = alone(submission, tmp_path, "--data", str(submission.shards))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / WEIGHTS).read_bytes() == (submission.folder / WEIGHTS).read_bytes()
    *lines, facts = done.stdout.splitlines()
    losses = [json.loads(line) for line in submission.run.log.read_text().splitlines()]
    for step in (line for line in losses if line.get("event", "step") == "step" and "loss" in line):
        assert any(line.startswith(f"step {step['step']}: loss {step['loss']:.4f}") for line in lines)
    assert json.loads(facts) == evaluate(tmp_path / WEIGHTS, EvaluateOptions(str(submission.shards))).facts()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [WEIGHTS, CODE]


def test_phases_growing_rows_and_own_text_are_those_of_the_run(submission: Submission, tmp_path: Path) -> None:
    """A loop that begins late, rows that grow, calibration on what the model writes, and shards that were packed."""
    packed = tmp_path / "packed"
    pack(PackOptions((str(write_text(tmp_path / "text")),), packed, "bytes"))
    wishes = ("model.blocks.order={at: [[0, 0..1], [0.5, 0..1 1]]}", "train.context={at: [[0, 16], [0.5, 32]]}")
    own_text = "quant.calibrate={sequences: 4, batch: 2, source: self, begin: uniform}"
    result = train(TrainOptions(small_spec(*wishes, own_text), "cpu", str(packed), tmp_path / "run"), lambda _: None)
    quantize(result.run, QuantizeOptions(max_tokens=100), lambda _: None)
    export_submission(result.run, tmp_path / "out", codec=Codec.LZMA)
    wanted = (tmp_path / "out" / WEIGHTS).read_bytes()
    done = alone(submission, tmp_path / "out", "--data", str(packed))
    assert done.returncode == 0, done.stderr
    assert "calibration tokens in" in done.stdout
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == wanted
    output: Any = evaluate(tmp_path / "out" / WEIGHTS, EvaluateOptions(str(packed)))  # in windows of a context
    assert json.loads(done.stdout.splitlines()[-1])["nats"] == output.nats


def test_two_processes_train_and_score_together(submission: Submission, tmp_path: Path) -> None:
    """As torchrun starts them: one file, and scores that both have added up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    run = make_run(tmp_path / "run", small_spec("train.micro_batch=2"), str(submission.shards))
    quantize(run.directory, QuantizeOptions(max_tokens=50), lambda _: None)
    export_submission(run.directory, tmp_path / "out", codec=Codec.LZMA)
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    data = ("--data", str(submission.shards))
    ranks = [
        started(submission, tmp_path / "out", *data, name=str(rank), RANK=str(rank), LOCAL_RANK=str(rank), **where)
        for rank in range(2)
    ]
    first, second = map(ended, ranks)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert not second.stdout
    facts = json.loads(first.stdout.splitlines()[-1])
    result = evaluate(tmp_path / "out" / WEIGHTS, EvaluateOptions(str(submission.shards))).facts()
    assert isinstance(result, dict) and facts["tokens"] == result["tokens"]
    assert facts["nats"] == pytest.approx(result["nats"], rel=1e-9)


@pytest.fixture
def few_passes_of_code(few_passes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer backward passes for estimates, in train_gpt.py as well."""
    sources, module = bundle._sources, "specc.runtime.calibration.added_nats"

    def changed() -> dict[str, str]:
        texts = sources()
        text = texts[module].replace("\nPASSES = 1024", "\nPASSES = 32")
        assert text != texts[module]
        return {**texts, module: text}

    monkeypatch.setattr(bundle, "_sources", changed)


@pytest.mark.usefixtures("few_passes_of_code")
def test_bits_are_allocated_within_what_the_code_leaves(submission: Submission, tmp_path: Path) -> None:
    """Corrections of low rank and bits under a budget, in which the code counts too."""
    # the code that allocates is 2,400 bytes larger, and the fewest bits take 19,971
    budget = (submission.folder / CODE).stat().st_size + 23_100
    wishes = (
        "quant.promote=null",
        "quant.allocate={bits: [4, 5, 6, 7, 8], match: blocks.*}",
        f"quant.budget_bytes={budget}",
    )
    spec = small_spec(*wishes, "quant.correct={rank: 2, count: 1, match: blocks.*}")
    run = make_run(tmp_path / "run", spec, str(submission.shards))
    widest = quantize(run.directory, QuantizeOptions(max_tokens=50), lambda _: None).size.total
    export_submission(run.directory, tmp_path / "out", codec=Codec.LZMA)
    done = alone(submission, tmp_path / "out", "--data", str(submission.shards), "--steps", "1")
    assert done.returncode == 0, done.stderr
    total = submission_size(tmp_path / "out", budget)
    assert not total.over and total.weights < widest < budget
    facts = evaluate(tmp_path / "out" / WEIGHTS, EvaluateOptions(str(submission.shards))).facts()
    assert json.loads(done.stdout.splitlines()[-1]) == facts
    assert "allocate: " in done.stdout


@pytest.mark.usefixtures("few_passes_of_code")
def test_what_was_trained_outlives_a_quantization_that_fails(submission: Submission, tmp_path: Path) -> None:
    """A budget that nothing meets ends it with an error; the weights are kept, and another budget goes on from them."""
    code = (submission.folder / CODE).stat().st_size
    wishes = "quant.promote=null", "quant.allocate={bits: [4, 5], match: blocks.*}"
    run = make_run(tmp_path / "run", small_spec(*wishes, f"quant.budget_bytes={code + 9000}"), str(submission.shards))
    quantize(run.directory, QuantizeOptions(max_tokens=50), lambda _: None)
    folder = tmp_path / "out"
    export_submission(run.directory, folder, codec=Codec.LZMA)
    (folder / WEIGHTS).unlink()
    data = ("--data", str(submission.shards))
    done = alone(submission, folder, *data, "--steps", "-2")
    assert done.returncode == 2 and "--steps" in done.stderr and not (folder / WEIGHTS).exists()
    done = alone(submission, folder, *data, "--steps", "2")
    assert done.returncode == 4 and "bytes even with the fewest bits" in done.stderr
    size = f"the budget is {code + 9000:,} bytes, less {(folder / CODE).stat().st_size:,} for the code"
    assert size in done.stderr
    weights_file = folder / f"{WEIGHTS}.trained"
    resume_command = f"resume with: python {CODE} quantize {WEIGHTS} --data {submission.shards} --budget BYTES"
    assert resume_command in done.stderr.replace("[", "").replace("]", "") and weights_file.is_file()
    assert not (folder / WEIGHTS).exists()
    trained, budget = weights_file.read_bytes(), (folder / CODE).stat().st_size + 21_000
    done = alone(submission, folder, "quantize", *data, "--budget", "1000")
    assert done.returncode == 4 and weights_file.read_bytes() == trained
    assert f"the budget is 1,000 bytes, less {(folder / CODE).stat().st_size:,} for the code" in done.stderr
    done = alone(submission, folder, "quantize", *data, "--budget", str(budget))
    assert done.returncode == 0, done.stderr
    assert not submission_size(folder, budget).over and not weights_file.exists()
    assert json.loads(done.stdout.splitlines()[-1])["tokens"] > 0
    done = alone(submission, folder, "quantize", *data)
    assert done.returncode == 4 and "train first: quantization needs trained weights" in done.stderr
    weights_file.write_bytes(b"no weights")
    done = alone(submission, folder, "quantize", *data)
    assert done.returncode == 4 and "contains no trained weights" in done.stderr


def test_brotli_is_missed_with_words_and_never_replaced(submission: Submission, tmp_path: Path) -> None:
    said: list[str] = []
    export_submission(submission.run.directory, tmp_path / "out", codec=Codec.BROTLI, say=said.append)
    assert said[-1].startswith("train_gpt.py is for cpu, compresses the weights with brotli, and needs Python 3.")
    assert said[-1].endswith(" or later, torch, numpy and brotli")
    done = alone(submission, tmp_path / "out", "score", "--data", str(submission.shards))
    assert done.returncode == 3 and "brotli, which is not installed" in done.stderr and "--codec lzma" in done.stderr
    assert (tmp_path / "out" / WEIGHTS).stat().st_size < (submission.folder / WEIGHTS).stat().st_size


def test_hostile_weights_are_refused(submission: Submission, tmp_path: Path) -> None:
    shutil.copy(submission.folder / CODE, tmp_path)
    good = (submission.folder / WEIGHTS).read_bytes()
    pickled = b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR."
    bad = {
        "empty": b"",
        "cut": good[:-7],
        "long": good + b"\0",
        "flipped": good[:-9] + bytes([good[-9] ^ 4]) + good[-8:],
        "pickle": pickled,
        "sections": good[:12] + struct.pack("<I", 2**32 - 1) + good[16:],
    }
    for name, data in bad.items():
        (tmp_path / name).write_bytes(data)
    # one process for all of them: Python takes seconds to import torch
    body = f"import sys\nfor sys.argv[2] in {[*bad]}:\n    print(main())\n"
    loop = "".join(f"  {line}\n" for line in body.splitlines())
    text = (submission.folder / CODE).read_text("latin-1")
    assert "  c=main()\n" in text
    (tmp_path / CODE).write_text(text.replace("  c=main()\n", f"{loop}  c=0\n"), "latin-1")
    done = alone(submission, tmp_path, "score", "x", "--data", str(submission.shards))
    assert done.stdout.split() == ["5"] * len(bad), done.stderr
    assert done.stderr.count("error: ") == len(bad) and "Traceback" not in done.stderr
    assert not (tmp_path / "hacked").exists()


def test_a_weights_file_of_another_model_is_refused(submission: Submission, tmp_path: Path) -> None:
    other = make_run(tmp_path / "run", small_spec("model.dim=16"), str(submission.shards))
    quantize(other.directory, QuantizeOptions(max_tokens=50), lambda _: None)
    shutil.copy(submission.folder / CODE, tmp_path)
    export_submission(other.directory, tmp_path / "other", codec=Codec.LZMA)
    done = alone(submission, tmp_path, "score", str(tmp_path / "other" / WEIGHTS), "--data", str(submission.shards))
    assert done.returncode == 5 and "the weights belong to another model" in done.stderr and not done.stdout


def test_data_that_is_none_is_told(submission: Submission, tmp_path: Path) -> None:
    shutil.copy(submission.folder / CODE, tmp_path)
    (tmp_path / "words.txt").write_text("words")
    done = alone(submission, tmp_path, "train", "--data", str(tmp_path / "words.txt"))
    assert done.returncode == 2 and "contains no token shards" in done.stderr and "Traceback" not in done.stderr


def test_a_submission_that_recomputes_has_the_operations_of_its_order(submission: Submission) -> None:
    """And one that does not has no part of them."""
    parts = []
    for recompute in ((), ("mlp",)):
        train = submission.run.spec.train.model_copy(update={"recompute": recompute})
        spec = submission.run.spec.model_copy(update={"train": train})
        files = bundle.modules(spec, submission.run.lock, ("cpu",), ByteTokenizer(), Codec.LZMA)
        tree = ast.parse(files[f"{bundle.JOINED}.py"])
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        calls = [
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".impl")
        ]
        assert all(ast.unparse(call.args[1]) in functions for call in calls)
        parts.append([ast.literal_eval(call.args[0]) for call in calls])
    assert parts == [[], ["after", "empty_after"]]


def test_the_code_is_small_and_without_specc(submission: Submission) -> None:
    """No statement of the files that it unpacks imports specc, and all of them parse."""
    files = bundle.modules(submission.run.spec, submission.run.lock, ("cpu",), ByteTokenizer(), Codec.LZMA)
    known = {*sys.stdlib_module_names, "torch", "numpy", "filelock", "brotli", bundle.PACKAGE}
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {result.partition(".")[0] for result in names} <= known, name
    assert (submission.folder / CODE).stat().st_size < 47_500
    spec = submission.run.spec
    text = bundle.train_gpt(spec, submission.run.lock, ("cpu",), ByteTokenizer(), Codec.LZMA)
    assert text == (submission.folder / CODE).read_bytes()


def test_the_code_for_a_gpu_is_small(tmp_path: Path) -> None:
    """The code of gpt_golf_sp8192 with its kernels, but with the table of a tokenizer of bytes."""
    spec = check.load(Path(__file__).parents[3] / "specs" / "gpt_golf_sp8192.yaml")[0]
    lock = Run(tmp_path, spec, "sm90", "").lock
    assert len(bundle.train_gpt(spec, lock, ("sm90",), ByteTokenizer(), Codec.BROTLI)) < 60_000


def test_gpu_sources_travel(tmp_path: Path) -> None:
    """Triton kernels and .cu files of sm90, and what compiles them, in a package without specc."""
    spec = check.load(Path(__file__).parents[3] / "specs" / "gpt_mini.yaml")[0]
    lock = Run(tmp_path, spec, "cpu", "").lock
    files = bundle.modules(spec, lock, ("sm90", "cpu"), ByteTokenizer(), Codec.BROTLI)
    assert {"sm90/model.py", "sm90_plain/model.py", "cpu/model.py", "cpu_plain/model.py"} <= files.keys()
    cutlass = [name for name in files if name.endswith(".cu")]
    assert cutlass and all(name.startswith("sm90/") for name in cutlass)
    for name in cutlass:
        assert re.search("from parts.main import [A-Z][A-Za-z]? as library", files[name.replace(".cu", ".py")])
    assert any("triton" in text and name.startswith("sm90/") for name, text in files.items())
    needs = requirements(spec, lock, ("sm90", "cpu"), Codec.BROTLI)
    assert needs[1:] == ["nvcc", "torch", "numpy", "brotli", "nvidia-cutlass"]
    assert requirements(spec, lock, ("cpu",), Codec.LZMA)[1:] == ["torch", "numpy"]
    for name, text in files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


def test_size_counts_exactly_the_two_files(
    submission: Submission, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(submission.folder, tmp_path / "s"))
    result = submission_size(folder)
    total = (folder / CODE).stat().st_size + (folder / WEIGHTS).stat().st_size
    assert (result.total, result.budget, result.over, result.others) == (total, 16_000_000, False, ())
    (folder / "notes.txt").write_text("more")
    assert specc(["size", str(folder)]) == 0 and specc(["size", str(folder), "--budget", "1"]) == 1
    shown = capsys.readouterr().out
    assert f"{total:,} bytes of 16,000,000" in shown and "not counted: notes.txt" in shown
    assert submission_size(folder, total).over is False and submission_size(folder, total - 1).over is True
    assert size(folder / WEIGHTS).total == result.weights
    (folder / WEIGHTS).unlink()
    with pytest.raises(IntegrityError, match="No such file"):
        submission_size(folder)
    (folder / WEIGHTS).symlink_to(submission.folder / WEIGHTS)
    with pytest.raises(IntegrityError, match="not a regular file"):
        submission_size(folder)


def test_what_cannot_be_a_submission(submission: Submission, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="exists"):
        export_submission(submission.run.directory, submission.folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="is not a folder"):
        export_submission(submission.run.directory, tmp_path / "file")
    with pytest.raises(TargetError):
        export_submission(submission.run.directory, tmp_path / "out", targets=("sm90",))
    raw = make_run(tmp_path / "raw", small_spec(), str(submission.shards))
    with pytest.raises(RunFailure, match="is not quantized"):
        export_submission(raw.directory, tmp_path / "out")
    nothing = make_run(tmp_path / "none", small_spec("quant=null"), str(submission.shards))
    with pytest.raises(ExportError, match="is not a quantized text model"):
        export_submission(nothing.directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_force_replaces_both_and_the_same_run_gives_the_same_bytes(submission: Submission, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / CODE).write_text("old")
    (folder / WEIGHTS).write_text("old")
    export_submission(submission.run.directory, folder, codec=Codec.LZMA, force=True)
    assert all((folder / name).read_bytes() == (submission.folder / name).read_bytes() for name in (CODE, WEIGHTS))


@pytest.mark.gpu
@pytest.mark.nvcc
def test_the_gpu_code_trains_and_scores_alone(tmp_path: Path) -> None:
    """Triton, CUTLASS through nvcc, CUDA graphs and torch.compile, with torch's and CUTLASS's packages alone; the score
    is that of `specc eval`."""
    target = "sm{}{}".format(*torch.cuda.get_device_capability())
    spec = small_spec(f"targets=[cpu, {target}]", "model.dim=128")
    run = make_run(tmp_path / "run", spec, str(write_shards(tmp_path)))
    quantize(run.directory, QuantizeOptions(target="cpu", max_tokens=50), lambda _: None)
    export_submission(run.directory, tmp_path / "out", targets=(target,))
    only = tmp_path / "alone"
    only.mkdir()
    more = (
        "brotli.py",
        "_brotli*",
        "jinja2",
        "markupsafe",
        "setuptools",
        "cutlass_library",
        "nvidia_cutlass-*",
        "torch-*",
        "triton-*",  # says where its backends are
    )
    for path in (path for packages in sys.path for name in (*ALONE, *more) for path in Path(packages).glob(name)):
        if not (only / path.name).exists():  # of two, the one that is imported
            (only / path.name).symlink_to(path)
    server = only_torch(only, ("specc", "pydantic", "sentencepiece", "click", "platformdirs"))
    submission = Submission(run, tmp_path, tmp_path / "out", server)
    done = alone(submission, submission.folder, "--data", str(tmp_path), "--steps", "3")
    server.close()
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    result = evaluate(submission.folder / WEIGHTS, EvaluateOptions(str(tmp_path)), target=target).facts()
    assert isinstance(result, dict) and facts["nats"] == pytest.approx(result["nats"], rel=1e-6)
