"""Decoding steps in which attention rotates and writes the new token, in whole models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_of_time import gpu_of, on_gpu, problems
from gpus import gpu_target, skip_without_e4m3
from sampled_tokens import sample_tokens
from test_few_rows import loaded_of, texts
from tiny_models import MLP, tiny

from specc.compiler import pipeline
from specc.compiler.build import decoding_files
from specc.compiler.spec.spec import Spec
from specc.compiler.targets import TARGETS
from specc.runtime.decode.few_rows import step_of
from specc.runtime.decode.pages import decoder_of, page_of
from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import Decoder
from specc.runtime.dtypes import DTYPES
from specc.runtime.model.load import import_model
from specc.runtime.model.protocols import text_model

HEADS = {"kind": "attention", "heads": 8, "kv_heads": 2, "head_dim": 64, "rope": {}}
WINDOW = {"kind": "attention", "name": "window", "heads": 4, "head_dim": 32, "rope": {"dims": 16}}
WINDOW |= {"mask": "j <= i and i - j < 40"}
LAYOUTS: dict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any]]] = {
    "rows": ((HEADS,), {"page": None}),
    "rows and a ring": ((HEADS, WINDOW), {"page": None}),
    "codes": ((HEADS,), {"page": None, "dtype": "e4m3"}),
    "pages": ((HEADS, WINDOW), {"page": 16}),
    "pages of codes": ((HEADS,), {"page": 64, "dtype": "e4m3"}),
}


def spec_of(name: str, *targets: str) -> Spec:
    layers, cache = LAYOUTS[name]
    mlp = {**MLP, "hidden": 256}
    return tiny(layers=(*layers, mlp), dim=128, context=512, vocab=64, fuse=(), targets=targets, cache=cache)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_launches_one_kernel_for_rotation_write_and_attention(name: str, tmp_path: Path) -> None:
    spec = spec_of(name, "sm90")
    for file, text in decoding_files(spec, "sm90").items():
        (tmp_path / file).write_text(text)
    programs = pipeline.run(spec, "sm90", form="decoding")
    (graph,) = programs.programs
    sizes = {"B": 3, "S": 512, "R": 3, "K": 1, "N": 8, "P": 24}
    given = {label: on_gpu(type.extents(sizes), DTYPES[type.dtype]) for label, type in graph.inputs}
    inputs = [given.pop(label) for label in ("ids", "start", "starts", "table") if label in given]
    model = import_model(tmp_path).Model()
    for label, parameter in list(model.named_parameters()):
        owner, _, leaf = label.rpartition(".")
        delattr(model.get_submodule(owner), leaf)
        setattr(model.get_submodule(owner), leaf, on_gpu(parameter.shape, torch.bfloat16))
    places: dict[str, list[Any]] = {}
    for label, value in given.items():
        places.setdefault(".".join(label.split(".")[:2]), []).append(value)
    with gpu_of(TARGETS["sm90"]) as launches, torch.no_grad():
        step = model.step if page_of(spec) else model.decode
        logits = step(*inputs, list(map(tuple, places.values())))
    kernels = [launch.kernel for launch in launches]
    attention = [kernel for kernel in kernels if kernel.startswith("rope_")]
    calls = [node for node in graph.nodes if node.op.name == "call"]
    assert tuple(logits.shape) == (3, spec.model.vocabulary) and problems(launches, tmp_path) == []
    assert len(attention) == len(LAYOUTS[name][0]) * max(1, len(calls))
    assert not {"rope_write_kernel", "join_kernel", "to_codes_kernel"} & {*kernels}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_of_one_kernel_are_as_exact_as_those_of_two(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 tokens, against a model in f32. The steps with two kernels have no pass that joins them."""
    target = gpu_target()
    if "codes" in name:
        skip_without_e4m3(target)
    spec, device = spec_of(name, "cpu", gpu_target()), torch.device("cuda")
    ids = texts(spec, rows, 304).cuda()
    results = []
    exact = loaded_of(spec, "cpu", "cuda")
    for passes in (None, (pipeline.ROW_LINEARS, pipeline.ROPE_WRITES, pipeline.ROPE_ATTENTIONS), ()):
        source = exact if passes is None else loaded_of(spec, target, "cuda")
        if passes is not None:
            monkeypatch.setitem(pipeline.PIPELINES, "decoding", passes or (pipeline.ROW_LINEARS, pipeline.ROPE_WRITES))  # type: ignore[arg-type]
        model: Any = source.model
        step = None if passes is None else step_of(source, rows)
        decoder = decoder_of(model, spec.model.window, device, rows, step)
        logits = [decoder.prefill(ids[:, :4]).clone(), *(decoder.append(row).clone() for row in ids[:, 4:].T)]
        results.append(torch.stack(logits))
    wanted, joined, apart = results
    errors = [float((value - wanted).square().mean().sqrt()) for value in (joined, apart)]
    assert errors[0] < 1.1 * errors[1] + 1e-6, errors


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rows", "rows and a ring"])
def test_captured_steps_sample_the_same_tokens_each_time(name: str) -> None:
    """300 replays of a step, three times: the same tokens, which are those of the logits."""
    spec, device = spec_of(name, "cpu", gpu_target()), torch.device("cuda")
    loaded = loaded_of(spec, gpu_target(), "cuda")
    start, results = texts(spec, 3, 4).cuda(), []
    for _ in range(3):
        decoder = Decoder(text_model(loaded.model), spec.model.window, device, 3, step_of(loaded, 3))
        sampled = sample_tokens(decoder, start, spec.model.vocabulary, Sampling(0.9), (1, 2, 3), 300)
        results.append(torch.stack(list(sampled), 1))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert len(results[0].unique()) > 20
