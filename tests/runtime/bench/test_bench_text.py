"""`specc bench` of text models: decoding with each cache and by Transformers, and the update of the optimizers."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_samples import SPEC
from tiny_models import ATTENTION, MLP, tiny
from torch import nn

from specc.cli.app import run
from specc.compiler import pipeline
from specc.compiler.programs.cost import cached_numbers, decode_cost
from specc.compiler.spec.check import load
from specc.runtime.bench import decode_text, optimizer
from specc.runtime.bench.decode_text import CODES, CONTIGUOUS, DYNAMIC, PAGED, STATIC
from specc.runtime.bench.optimizer import TORCH, TRAINED, torch_adamw

pytestmark = pytest.mark.usefixtures("short_passes")

LLAMA = """
spec_version: 2
name: small_llama
targets: [cpu, sm90]
model:
  kind: decoder
  vocab: 300
  dim: 32
  context: 32
  embed: [{kind: token}]
  blocks:
    count: 2
    norm: {kind: rms, weight: w, eps: 0.00001}
    layers:
      - {kind: attention, heads: 4, kv_heads: 2, rope: {base: 10000}}
      - {kind: mlp, hidden: 64, act: silu(gate) * x}
  norm: {kind: rms, weight: w, eps: 0.00001}
train:
  data: {tokenizer: bytes}
  tokens_per_step: 256
  steps: 100
  optimizers:
    - {kind: muon, match: "blocks.*.{q,k,v,out,up,gate,down}", lr: 0.02}
    - {kind: adamw, match: "*", lr: 0.001, weight_decay: 0.1}
  average: {kind: ema, decay: 0.9}
"""


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model of a family of Transformers, which compiles nothing here."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **words: function or (lambda given: given))
    (path := tmp_path / "llama.yaml").write_text(LLAMA)
    return path


def bench(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> dict[str, Any]:
    assert run(["bench", str(path), "--target", "cpu", *arguments, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_codes_have_no_row_of_more_texts_than_their_kernels(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders = decode_text._decoders

    def coded(*arguments: Any) -> Any:
        name, decoder = next(decoders(*arguments))
        yield from ((name, decoder), (CODES, replace(decoder, most=2)))

    monkeypatch.setattr(decode_text, "_decoders", coded)
    decode = bench(capsys, llama, "--only", "decode", "--batch", "2", "--batch", "3", "--context", "8")["decode"]
    assert [(row["decoder"], row["batch"]) for row in decode["rows"]] == [(CONTIGUOUS, 2), (CODES, 2), (CONTIGUOUS, 3)]
    assert list(decode["missing"]) == [f"{CODES}, 3 x 8"] and "up to 2 texts" in decode["missing"][f"{CODES}, 3 x 8"]


def test_all_decoders_compute_the_same_logits(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "1", "--batch", "3", "--context", "8", "--context", "32"]
    data = bench(capsys, llama, "--only", "decode", *sizes)
    decode, ceilings = data["decode"], data["ceilings"]
    rows = {(row["decoder"], row["batch"], row["context"]): row for row in decode["rows"]}
    assert list(rows) == [
        (name, batch, context)
        for context in (8, 32)
        for batch in (1, 3)
        for name in (CONTIGUOUS, PAGED, DYNAMIC, STATIC)
    ]
    assert (decode["dtype"], decode["trained"], decode["missing"]) == ("f32", False, {})
    programs = pipeline.lower(load(llama)[0], "cpu")
    for (name, batch, context), row in rows.items():
        assert row["tokens"] == context // 2
        assert row["tokens_per_second"] == pytest.approx(1e3 * batch / row["token"]["ms"])
        assert row["share_of_floor"] == pytest.approx(row["floor_ms"] / row["token"]["ms"])
        flops, *moved = decode_cost(programs, batch, context - row["tokens"] // 2)
        seconds = flops / ceilings["flops_per_second"], sum(moved) / ceilings["read_bytes_per_second"]
        assert row["floor_ms"] == pytest.approx(1e3 * max(seconds))
        assert row["error"] is None if name == CONTIGUOUS else 0 <= row["error"] < 1e-5
    assert any(row["error"] for row in rows.values())  # the weights are random, so the last bits differ


def test_the_peer_has_the_weights_of_a_spec_in_its_dtype(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers: list[nn.Module] = []
    theirs = decode_text._theirs
    monkeypatch.setattr(decode_text, "_theirs", lambda model, *rest: peers.append(model) or theirs(model, *rest))
    sizes = ["--batch", "1", "--context", "8", "--set", "train.precision.compute=bf16"]
    decode = bench(capsys, llama, "--only", "decode", *sizes)["decode"]
    errors = {row["decoder"]: row["error"] for row in decode["rows"]}
    assert decode["dtype"] == "bf16" and list(errors) == [CONTIGUOUS, PAGED, DYNAMIC, STATIC]
    assert errors[DYNAMIC] < 0.1 and {parameter.dtype for parameter in peers[0].parameters()} == {torch.bfloat16}


def test_wrong_logits_get_no_time(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--only", "decode", "--batch", "1", "--context", "8"]
    spoil(monkeypatch, "_theirs", lambda logits: 1.1 * logits)
    decode = bench(capsys, llama, *arguments)["decode"]
    assert [row["decoder"] for row in decode["rows"]] == [CONTIGUOUS, PAGED]
    assert list(decode["missing"]) == [f"{DYNAMIC}, 1 x 8", f"{STATIC}, 1 x 8"]
    assert "differ from those of the contiguous cache by 10.0% of the largest" in decode["missing"][f"{STATIC}, 1 x 8"]
    calls = iter((1.0, 1.1))
    spoil(monkeypatch, "_ours", lambda logits: next(calls) * logits)
    assert run(["bench", str(llama), "--target", "cpu", *arguments]) == 4
    assert "error: R001 cache in pages, 1 x 8: logits differ" in " ".join(capsys.readouterr().err.split())
    calls = iter((1.0, 1.1))
    last = torch.tensor([[0.0], [1.0]])
    monkeypatch.undo()
    spoil(monkeypatch, "_ours", lambda logits: (1 + last * (next(calls) - 1)) * logits)
    assert run(["bench", str(llama), "--target", "cpu", "--only", "decode", "--batch", "2", "--context", "8"]) == 4
    assert "error: R001 cache in pages, 2 x 8: logits differ" in " ".join(capsys.readouterr().err.split())


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    make = getattr(decode_text, name)

    def other(*arguments: Any) -> decode_text._Decoder:
        decoder = make(*arguments)
        return decode_text._Decoder(lambda ids: change(decoder.logits(ids)), decoder.passes, decoder.programs)

    monkeypatch.setattr(decode_text, name, other)


def test_what_cannot_be_decoded_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [word for text in ("model.dim=32", "model.blocks.count=1") for word in ("--set", text)]
    command = ["bench", str(SPEC), "--target", "cpu", *sizes, "--only", "decode", "--batch", "1"]
    assert run([*command, "--context", "16"]) == 0
    shown = capsys.readouterr()
    assert "not measured: transformers: no family of Transformers has this model" in shown.out
    assert max(map(len, shown.out.splitlines()[5:-8])) <= 120
    assert "  contiguous cache, 1 x 16: " in shown.err
    assert run([*command, "--context", "512"]) == 4
    assert "a context of 512 tokens is not in the range of gpt_mini, 4 to 256" in capsys.readouterr().err
    assert run([*command, "--context", "3"]) == 4
    monkeypatch.setattr(decode_text, "find_spec", lambda name: None)
    capsys.readouterr()
    assert run([*command, "--context", "16"]) == 0
    assert "not measured: transformers: is not installed: pip install transformers" in capsys.readouterr().out


def test_options_of_decoding_are_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    poly = SPEC.parent / "poly_transformer.yaml"
    assert run(["bench", str(poly), "--target", "cpu", "--only", "decode", "--batch", "1"]) == 4
    assert "--batch, --context and --tokens are for text models" in " ".join(capsys.readouterr().err.split())
    for option in ("--batch", "--context", "--tokens"):
        assert run(["bench", str(SPEC), "--target", "cpu", "--only", "step", option, "8"]) == 2
        assert f"{option} applies only to decode" in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("tied", [True, False])
def test_the_work_of_a_decoding_step(tied: bool) -> None:
    """Counted by hand: a lookup reads a row of each text, products read all weights, and the cache is read once."""
    model = tiny(layers=({**ATTENTION, "kv_heads": 1}, MLP), head={"tied": tied})
    programs = pipeline.lower(model, "cpu")
    table, whole = 11 * 8, sum(param.count for param in programs.params)
    for rows, tokens in ((1, 3), (4, 7)):
        cost = decode_cost(programs, rows, tokens)
        assert cost.weights == 4 * (whole if tied else whole - table + rows * 8)
        assert cost.cache == 4 * rows * cached_numbers(programs, tokens)
        assert cost.flops >= 2 * rows * (whole if tied else whole - table)


def test_the_experts_of_a_step_are_read_once() -> None:
    spec = load(SPEC.parent / "gpt_moe.yaml")[0]
    programs = pipeline.lower(spec, "cpu")
    whole = 4 * sum(param.count for param in programs.params)
    few, many = (decode_cost(programs, rows, 8).weights for rows in (1, 512))
    assert few < many <= whole


def test_updates(llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "SECONDS", 0.01)
    data = bench(capsys, llama, "--only", "optimizer", "--steps", "2")
    result = data["optimizer"]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [TRAINED, "muon blocks.*.{q,k,v,out,up,gate,down}", "adamw *", *TORCH]
    programs = pipeline.lower(load(llama)[0], "cpu")
    numbers = sum(param.count for param in programs.params)
    assert all(rows[name]["numbers"] == numbers for name in (TRAINED, *TORCH))
    muon, adamw = rows["muon blocks.*.{q,k,v,out,up,gate,down}"], rows["adamw *"]
    assert muon["numbers"] + adamw["numbers"] == numbers and muon["tensors"] == 2 * 7
    bandwidth = data["ceilings"]["bytes_per_second"]
    # weight, gradient and momentum are read; weight and momentum are written
    assert muon["floor_ms"] == pytest.approx(1e3 * 4 * 5 * muon["numbers"] / bandwidth)
    for name in TORCH:
        moved = 4 * 7 * numbers + 8 * rows[name]["tensors"]  # and a step count of each parameter, read and written
        assert rows[name]["floor_ms"] == pytest.approx(1e3 * moved / bandwidth)
    for row in rows.values():
        assert row["of_step"] == pytest.approx(row["update"]["ms"] / result["step"]["ms"])
        assert row["over_fused"] == pytest.approx(row["update"]["ms"] / rows["torch AdamW, fused"]["update"]["ms"])


def test_one_optimizer_has_one_row_of_its_own(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "SECONDS", 0.01)
    one = ["--set", 'train.optimizers=[{kind: adamw, match: "*", lr: 0.001}]']
    assert run(["bench", str(llama), "--target", "cpu", "--only", "optimizer", "--steps", "1", *one]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("optimizer"))) + 1 :]
    assert [line[:36].rstrip() for line in table[:4]] == [TRAINED, *TORCH]
    assert max(map(len, table)) <= 120


@pytest.mark.parametrize("name", TORCH)
def test_the_peers_are_adamw(name: str) -> None:
    """One update of each kind of kernel, against the formula in float64."""
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    parameter = nn.Parameter(weight.clone())
    parameter.grad = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    torch_adamw(name, [parameter]).step()
    expected = weight.double() * (1 - 1e-4) - 1e-3 * parameter.grad.double().sign()  # the first step has unit size
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)
