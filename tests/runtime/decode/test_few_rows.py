"""Decoding steps for few rows: the logits are those of the model, in float64, and the tokens those of its own steps."""

from typing import Any

import pytest
import torch
from golf_models import OPTIONS, spec_of
from gpus import gpu_target
from run_samples import EXPERTS, VARIANTS, small_spec
from sampled_tokens import sample_tokens
from tiny_models import ATTENTION, MLP, random_params, tiny
from torch import Tensor

from specc.compiler.ops.decoding.row_linear import RowLinear
from specc.compiler.pipeline import lower, run
from specc.compiler.spec.spec import Spec
from specc.runtime.decode.few_rows import few_row_model, step_of
from specc.runtime.decode.many_texts import sample_texts
from specc.runtime.decode.pages import PagedDecoder, decoder_of, page_of, with_cache
from specc.runtime.decode.sampling import Sampling
from specc.runtime.decode.text import Decoder
from specc.runtime.model.load import Loaded
from specc.runtime.model.protocols import text_model
from specc.runtime.open_model import realize

CPU = torch.device("cpu")
WINDOW = ("model.blocks.layers.0.mask=j <= i and (i - j < 5 or j < 2)",)
LATENT = (
    "model.blocks.layers.0={kind: latent, name: attention, heads: 4, kv_rank: 12, rope_dim: 4}",
    "fuse=[]",
    "quant=null",
    'train.optimizers=[{kind: adamw, match: "*", lr: 0.01}]',
)
# Caches whose rows are written by the kernel that rotates: changes of the spec, settings of the cache
WRITES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "rows": ((), {}),
    "ring": (WINDOW, {}),
    "latents": (LATENT, {}),
    "latents in a ring": ((*LATENT, *WINDOW), {}),
}
WRITES |= {f"{name} of e4m3": (changes, {"dtype": "e4m3"}) for name, (changes, _) in WRITES.items()}
WRITES |= {
    f"{name} in pages": (changes, {"page": 8, **settings})
    for name, (changes, settings) in WRITES.items()
    if "ring" not in name
}
GOLF = ("full", "smear_bos", "gate_sparse", "parallel", "loop_three_times_gated", "late_stack")
SPECS = {
    **{name: small_spec(*changes) for name, changes in VARIANTS.items()},
    "experts": small_spec(*EXPERTS),
    "layer norms, biases": small_spec("model.blocks.norm={kind: layer}", "model.norm={kind: layer}", "quant=null"),
    **{name: spec_of(OPTIONS[name]) for name in GOLF},
}


def loaded_of(spec: Spec, target: str = "cpu", device: str = "cpu") -> Loaded:
    weights = {name: value.float() for name, value in random_params(lower(spec, "cpu"), 0).items()}
    return realize(spec, target, device, weights)


def texts(spec: Spec, rows: int, length: int) -> Tensor:
    return torch.randint(2, spec.model.vocabulary, (rows, length), generator=torch.Generator().manual_seed(rows))


def check_steps(loaded: Loaded, spec: Spec) -> Any:
    """Compares the logits of steps for few rows with those of the model's own steps, in float64. Returns the step."""
    loaded.model.double()
    step: Any = few_row_model(loaded).decode
    ids = texts(spec, 3, 9)
    with torch.no_grad():
        decoders = [Decoder(text_model(loaded.model), spec.model.window, CPU, 3, each) for each in (step, None)]
        results = [[decoder.prefill(ids[:, :2]), *map(decoder.append, ids[:, 2:].T)] for decoder in decoders]
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert float(results[1][-1].std()) > 0.01
    return step


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_the_model(name: str) -> None:
    check_steps(loaded_of(SPECS[name]), SPECS[name])


def test_every_product_of_a_step_reads_its_weights_once_with_the_norm_before_and_the_sum_after() -> None:
    programs = run(small_spec("model.blocks.layers.0.qk_norm=null", "fuse=[]"), "cpu", form="decoding")
    products = [node for graph in programs.graphs for node in graph.nodes if isinstance(node.op, RowLinear)]
    assert [(node.op.weights, node.op.norm is not None, node.epilogue is not None) for node in products] == [
        (1, False, True),  # the logits
        (3, True, False),  # q, k, v
        (1, False, True),  # out and the residual
        (1, True, True),  # up and the activation
        (1, False, True),  # down and the residual
    ]
    names = [node.op.name for graph in programs.graphs for node in graph.nodes]
    assert names.count("rope_write") == 1 and not {"rope", "cache_write", "linear"} & {*names}


@pytest.mark.parametrize("name", WRITES)
def test_every_layout_of_a_cache_is_written_by_the_kernel_that_rotates(name: str) -> None:
    changes, settings = WRITES[name]
    spec = with_cache(small_spec(*changes), **settings)
    programs = run(spec, "cpu", form="decoding")
    names = [node.op.name for graph in programs.graphs for node in graph.nodes]
    assert names.count("rope_write") == 1 and not {"rope", "cache_write", "paged_write", "to_codes"} & {*names}
    loaded = loaded_of(spec)
    loaded.model.double()
    model: Any = loaded.model
    few: Any = few_row_model(loaded)
    ids = texts(spec, 3, 32)
    results = []
    with torch.no_grad():
        for step in (few.step if page_of(spec) else few.decode, None):
            decoder = decoder_of(model, spec.model.window, CPU, 3, step)
            results.append([decoder.prefill(ids[:, :2]), *(decoder.append(row).clone() for row in ids[:, 2:].T)])
        every = [model.score(ids, torch.full_like(ids, token)) for token in range(spec.model.vocabulary)]
    got, wanted = (torch.stack(result, 1).log_softmax(-1) for result in results)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    uncached = -torch.stack(every, -1)[:, 1:]
    near = 1e-9 if "dtype" not in settings else 0.3 * float(uncached.std())  # e4m3 has 3 bits of mantissa
    torch.testing.assert_close(got[..., : uncached.shape[-1]], uncached, rtol=near, atol=near)
    assert float(uncached.std()) > 0.01


def test_rows_that_others_read_are_written_apart() -> None:
    pooled = {**ATTENTION, "rope": {}, "mask": "j <= i and i - j < 3", "pool": {"by": "mean", "block": 2}}
    excluded = {**ATTENTION, "rope": {}, "exclude": {}}
    text, other = (
        "\n".join(map(str, run(tiny(layers=(layer, MLP), fuse=()), "cpu", form="decoding").graphs))
        for layer in (pooled, excluded)
    )
    assert "rope_write" not in text and "ring_keys" in text and "cache_write" in text  # pools read the ring too
    assert "= rope_write(" in other and "cache_write" not in other  # values are an input, which others may read


def test_tokens_do_not_depend_on_compilation() -> None:
    spec = small_spec("model.blocks.count=1")
    loaded, results = loaded_of(spec), []
    for compiled in (False, True):
        step = step_of(loaded, 1, compiled)
        decoder = Decoder(text_model(loaded.model), spec.model.window, CPU, 1, step)
        results.append(list(map(int, sample_tokens(decoder, texts(spec, 1, 4), 257, Sampling(0.8, 20), (3,), 12))))
    assert results[0] == results[1] and len(set(results[0])) > 3


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 16, 40, 64])
@pytest.mark.parametrize("name", ["grouped, rope over all dims", "partial rope", "skips, scaled norms"])
def test_steps_on_a_gpu_are_within_bf16_of_the_model(name: str, rows: int) -> None:
    changes = [change for change in VARIANTS[name] if not change.startswith("fuse")]
    spec = small_spec(*changes, f"targets=[cpu, {gpu_target()}]", "fuse=[]")
    exact = loaded_of(spec, "cpu", "cuda")
    loaded = loaded_of(spec, gpu_target(), "cuda")
    ids, device = texts(spec, rows, 20).cuda(), torch.device("cuda")
    step = step_of(loaded, rows)
    assert step.__self__ is not loaded.model  # type: ignore[attr-defined]
    sources = ((exact, None), (loaded, None), (loaded, step))
    results = []
    for source, each in sources:
        decoder = Decoder(text_model(source.model), spec.model.window, device, rows, each)
        results.append([decoder.prefill(ids[:, :4]).clone(), *(decoder.append(row).clone() for row in ids[:, 4:].T)])
    wanted, plain, got = (torch.stack(result) for result in results)
    errors = [float((value - wanted).square().mean().sqrt()) for value in (got, plain)]
    assert errors[0] < 1.2 * errors[1] + 1e-6, errors


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.8), Sampling(1.0, 7), Sampling(1.1, None, 0.8)])
def test_captured_steps_sample_what_the_reference_samples(sampling: Sampling) -> None:
    spec = small_spec(f"targets=[cpu, {gpu_target()}]")
    loaded, device = loaded_of(spec, gpu_target(), "cuda"), torch.device("cuda")
    decoder = Decoder(text_model(loaded.model), spec.model.window, device, 3, step_of(loaded, 3))
    start = texts(spec, 3, 4).cuda()
    tokens = torch.stack(list(sample_tokens(decoder, start, 257, sampling, (1, 2, 3), 24)), 1)
    assert any(each.replays for each in decoder._sampled.values())
    # The same logits again, of the sampled texts, and their tokens by a sort.
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]
    uniform = torch.stack([torch.rand(24, dtype=torch.float64, generator=g) for g in generators], 1).to(device)
    logits = decoder.prefill(start)
    for at in range(24):
        assert torch.equal(sampling.pick(logits[:, :257], uniform[at]), tokens[:, at]), at
        logits = decoder.append(tokens[:, at])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("name", WRITES)
def test_every_layout_of_a_cache_on_a_gpu_is_within_bf16_of_the_model(name: str, rows: int) -> None:
    changes, settings = WRITES[name]
    spec = with_cache(small_spec(*changes, f"targets=[cpu, {gpu_target()}]", "fuse=[]"), **settings)
    exact = loaded_of(spec, "cpu", "cuda")
    loaded = loaded_of(spec, gpu_target(), "cuda")
    ids, device = texts(spec, rows, 30).cuda(), torch.device("cuda")
    results = []
    for source, step in ((exact, None), (loaded, None), (loaded, step_of(loaded, rows))):
        model: Any = source.model
        decoder = decoder_of(model, spec.model.window, device, rows, step)
        results.append([decoder.prefill(ids[:, :4]).clone(), *(decoder.append(row).clone() for row in ids[:, 4:].T)])
    assert all(step.replays for step in decoder._steps.values())
    wanted, plain, got = (torch.stack(result) for result in results)
    errors = [float((value - wanted).square().mean().sqrt()) for value in (got, plain)]
    assert errors[0] < 1.3 * errors[1] + 1e-6, errors


@pytest.mark.gpu
def test_texts_in_pages_do_not_depend_on_blocks_on_a_gpu() -> None:
    spec = with_cache(
        small_spec(f"targets=[cpu, {gpu_target()}]", "model.context=128", "train.tokens_per_step=512"), page=8
    )
    loaded, device = loaded_of(spec, gpu_target(), "cuda"), torch.device("cuda")
    model: Any = loaded.model
    prompts = [texts(spec, 1, length)[0].tolist() for length in (3, 9, 1, 5, 2, 12, 7, 4)]
    results = []
    for block in (1, 5, 16, 16):
        decoder = PagedDecoder(model, spec.model.window, 8, 40, device, step_of(loaded, 4))
        written: dict[int, list[int]] = {}
        # All texts have one number of tokens, so that four rows are always in use: other shapes round in other ways.
        arguments = (prompts, 257, Sampling(0.9), range(8), 50, 4, None, block)
        for index, token, _ in sample_texts(decoder, *arguments):
            written.setdefault(index, []).append(token)
        assert any(rows.replayed.replays for rows in decoder._rows.values())
        results.append(written)
    assert all(written == results[0] for written in results)
    assert {len(text) for text in results[0].values()} == {50}
    first, last = results[0][0], results[0][0][3]
    ended = list(sample_texts(decoder, prompts, 257, Sampling(0.9), range(8), 50, 4, last))
    assert [token for index, token, _ in ended if index == 0] == first[: first.index(last) + 1]
    assert len(decoder._free) == 40 and sum(ends for _, _, ends in ended) == 8
