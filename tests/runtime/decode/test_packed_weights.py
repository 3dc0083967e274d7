"""Decoding steps that read the codes of a quantized model compute what its dequantized weights compute."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpus import gpu_target
from run_samples import EXPERTS, SMALL, SPEC, VARIANTS, small_spec
from sampled_tokens import sample_tokens
from test_few_rows import check_steps, texts
from tiny_models import random_params
from torch import Tensor

from specc.cli.app import run as command
from specc.compiler.build import canonical
from specc.compiler.passes.assign_quant import allocation
from specc.compiler.passes.decoding.packed_weights import STEP
from specc.compiler.pipeline import lower, run
from specc.compiler.spec.spec import Spec
from specc.runtime import generate
from specc.runtime.artifact.artifact import ArtifactContents, write_artifact
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.artifact.quantized_model import QuantizedModel, dequantized, quantize_tensors
from specc.runtime.bench.decode_text import CODES, CONTIGUOUS
from specc.runtime.decode.few_rows import few_row_model, library_step, step_of
from specc.runtime.decode.pages import PagedTexts, in_pages, page_of
from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import Decoder
from specc.runtime.model.load import Loaded
from specc.runtime.model.protocols import text_model
from specc.runtime.open_model import open_model, realize_stored

CPU = torch.device("cpu")
VECTORS_OF_SMALL = '{match: "*.{residual,q_gain}", scheme: none, dtype: f16}'
# Bits that differ by block and within a block, floats in one block, and a correction.
MIXED = (
    '{match: embed.token, scheme: round, bits: 8}, {match: "blocks.0.mlp.{up,down}", scheme: none, dtype: f32}, '
    '{match: "blocks.0.attention.{q,k,v,out}", scheme: round, bits: 3}, '
    '{match: "blocks.1.attention.q", scheme: round, bits: 2}, '
    '{match: "blocks.1.mlp.down", scheme: round, bits: 7, correction_rank: 2}'
)


def quantized(spec: Spec, target: str = "cpu", device: str = "cpu") -> tuple[Loaded, QuantizedModel]:
    """A quantized model of random weights, and what is stored."""
    programs = lower(spec, "cpu")
    params = {name: value.float() for name, value in random_params(programs, 0).items()}
    schemes = allocation(spec.quant, programs.stored)
    hessians = {
        name: torch.eye(value.shape[-1]).expand(*value.shape[:-2], -1, -1)
        for name, value in params.items()
        if value.ndim > 1
    }
    stored = quantize_tensors({name: params[name] for name in schemes}, schemes, hessians)
    return realize_stored(spec, target, device, stored, dequantized(stored)), stored


SPECS = {
    **{name: small_spec(*changes) for name, changes in VARIANTS.items()},
    "experts": small_spec(*EXPERTS),
    "layer norms, biases": small_spec(
        "model.blocks.norm={kind: layer}",
        "model.norm={kind: layer}",
        'quant.rules.1.match="*{residual,q_gain,norm_weight,norm_bias}"',
    ),
    "many kinds of codes": small_spec("quant.promote=null", f"quant.rules=[{MIXED}, {VECTORS_OF_SMALL}]"),
}


@pytest.mark.parametrize("name", SPECS)
def test_logits_of_codes_are_those_of_the_dequantized_weights(name: str) -> None:
    step = check_steps(quantized(SPECS[name])[0], SPECS[name])
    assert dict(step.__self__.named_buffers())


def test_greedy_texts_of_codes_are_those_of_the_dequantized_model() -> None:
    spec = SPECS["many kinds of codes"]
    loaded, _ = quantized(spec)
    results = []
    for step in (few_row_model(loaded).decode, library_step(loaded, 5)):
        decoder = Decoder(text_model(loaded.model), spec.model.window, CPU, 5, step)
        tokens = sample_tokens(decoder, texts(spec, 5, 4), 257, Sampling(0.0), range(5), 24)
        results.append(torch.stack(list(tokens), 1))
    assert torch.equal(*results) and len(results[0].unique()) > 3


def test_pages_are_read_by_the_same_kernels() -> None:
    spec = in_pages(small_spec())
    loaded, _ = quantized(spec)
    model: Any = loaded.model
    results = []
    for step in (few_row_model(loaded).step, None):
        decoder = PagedTexts(model, spec.model.window, page_of(spec), CPU, 2, step)
        tokens = sample_tokens(decoder, texts(spec, 2, 4), 257, Sampling(0.8), (1, 2), 20)
        results.append(torch.stack(list(tokens), 1))
    assert torch.equal(*results)


def test_every_product_reads_codes_or_has_a_reason() -> None:
    programs = run(SPECS["many kinds of codes"], "cpu", form="packed")
    rewritings = (rewriting for rewriting in programs.rewritings if rewriting.step == STEP)
    done = {(*rewriting.nodes, rewriting.text or rewriting.refusal) for rewriting in rewritings}
    assert done == {
        ("blocks.*.attention.q", "reads codes of 2 and 3 and 5 bits"),
        ("blocks.*.attention.out", "reads codes of 3 and 5 bits"),
        ("blocks.*.mlp.up", "reads codes of 5 bits"),
        ("head.logits", "reads codes of 8 bits"),
        ("blocks.0.mlp.up", "blocks.*.mlp.up: f32 has no codes"),
        ("blocks.*.mlp.down", "blocks.*.mlp.down: f32 has no codes"),
        ("blocks.*.mlp.down", "blocks.*.mlp.down: a kernel cannot decode int7 round, per row, rank 2 correction"),
    }
    experts = run(SPECS["experts"], "cpu", form="packed").rewritings
    assert any("grouped_linear has no kernel that decodes codes" in rewriting.refusal for rewriting in experts)
    unquantized = run(small_spec("quant=null"), "cpu", form="packed")
    assert not any(rewriting.text for rewriting in unquantized.rewritings) and not unquantized.buffers


def test_a_model_of_floats_reads_no_codes() -> None:
    loaded, _ = quantized(small_spec())
    step: Any = few_row_model(replace(loaded, stored=None)).decode
    assert not dict(step.__self__.named_buffers())


def artifact(folder: Path, *overrides: str) -> Path:
    """An artifact of random weights with many kinds of codes."""
    spec = small_spec("quant.promote=null", f"quant.rules=[{MIXED}, {VECTORS_OF_SMALL}]", *overrides)
    _, stored = quantized(spec)
    deployment = Deployment.of(spec)
    contents = ArtifactContents(
        spec=canonical(spec).encode(),
        interface=deployment.interface,
        code=deployment.code,
        layout=deployment.layout,
        tensors=stored.tensors,
    )
    write_artifact(path := folder / "model.specc", contents, quality=5)
    return path


def test_an_opened_artifact_generates_from_its_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(artifact(tmp_path), "cpu", "cpu")
    greedy = Sampling(0.0)
    usual = generate.generate(opened, "of a kernel", 20, greedy)
    assert opened.loaded.stored is not None and len(usual) > 3
    steps: list[Any] = []

    def coded_step(loaded: Loaded, *rest: Any) -> Any:
        steps.append(few_row_model(loaded).decode)
        return steps[-1]

    monkeypatch.setattr(generate, "step_of", coded_step)
    assert generate.generate(opened, "of a kernel", 20, greedy) == usual
    assert "embed.token_codes" in dict(steps[0].__self__.named_buffers())


@pytest.mark.gpu
def test_bench_measures_codes_beside_floats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = gpu_target()
    larger = (f"targets=[{target}, cpu]", "model.dim=128")  # codes of few features are mostly pads
    path = artifact(tmp_path, *larger)
    changes = [word for text in (*SMALL, *larger) for word in ("--set", text)]
    sizes = ["--batch", "1", "--batch", "4", "--context", "32", "--tokens", "8"]
    arguments = ["bench", str(SPEC), *changes, "--only", "decode", "--target", target, "--weights", str(path), *sizes]
    assert command([*arguments, "--json"]) == 0
    rows = {(row["decoder"], row["batch"]): row for row in json.loads(capsys.readouterr().out)["decode"]["rows"]}
    for batch in (1, 4):
        floats, codes = rows[CONTIGUOUS, batch], rows[CODES, batch]
        assert codes["floor_ms"] < floats["floor_ms"] and codes["token"]["ms"] > 0 and 0 <= codes["error"] < 0.1


def on_gpu(spec: Spec, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of float64 on the dequantized weights, of the step with library products, and of the step with codes."""
    device, ids = torch.device("cuda"), texts(spec, rows, 20).cuda()
    exact, _ = quantized(spec, "cpu", "cuda")
    loaded, _ = quantized(spec, gpu_target(), "cuda")
    step: Any = step_of(loaded, rows)
    assert dict(step.__self__.named_buffers())
    results = []
    for source, each in ((exact, None), (loaded, library_step(loaded, rows)), (loaded, step)):
        decoder = Decoder(text_model(source.model), spec.model.window, device, rows, each)
        results.append([decoder.prefill(ids[:, :4]).clone(), *(decoder.append(row).clone() for row in ids[:, 4:].T)])
    wanted, plain, got = (torch.stack(result) for result in results)
    return wanted, plain, got


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 40, 64])
@pytest.mark.parametrize("name", ["grouped, rope over all dims", "skips, scaled norms", "many kinds of codes"])
def test_steps_on_a_gpu_are_within_bf16_of_the_dequantized_model(name: str, rows: int) -> None:
    spec = SPECS[name].model_copy(update={"targets": ("cpu", gpu_target()), "fuse": ()})
    wanted, plain, got = on_gpu(spec, rows)
    errors = [float((value - wanted).square().mean().sqrt()) for value in (got, plain)]
    assert errors[0] < 1.2 * errors[1] + 1e-6, errors


@pytest.mark.gpu
def test_captured_steps_of_codes_sample_greedily_what_their_logits_say() -> None:
    spec = SPECS["many kinds of codes"].model_copy(update={"targets": ("cpu", gpu_target())})
    loaded, _ = quantized(spec, gpu_target(), "cuda")
    start = texts(spec, 3, 4).cuda()
    decoder = Decoder(text_model(loaded.model), spec.model.window, torch.device("cuda"), 3, step_of(loaded, 3))
    tokens = torch.stack(list(sample_tokens(decoder, start, 257, Sampling(0.0), (1, 2, 3), 24)), 1)
    assert any(each.replays for each in decoder._sampled.values())
    logits = decoder.prefill(start)
    for at in range(24):
        assert torch.equal(logits[:, :257].argmax(1), tokens[:, at]), at
        logits = decoder.append(tokens[:, at])
