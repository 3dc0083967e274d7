"""Kernels of decoding compile for GPUs that are not here, as their launchers call them, and fit onto them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ahead_of_time import Launch, compile_plan, gpu_of, on_gpu, problems, unequal_sums
from cached_sites import Cached
from kernel_sites import imported
from tiny_models import MLP, tiny

from specc.compiler import pipeline
from specc.compiler.kernels.attention.cached import CACHED_ATTENTION
from specc.compiler.spec.check import load
from specc.compiler.targets import TARGETS
from specc.runtime.decode.sampling import Sampling
from specc.runtime.dtypes import DTYPES

SPECS = Path(__file__).parents[3] / "specs"
ROPE: dict[str, Any] = {"rope": {}}
HEADS = {"kind": "attention", "heads": 8, "kv_heads": 2, "head_dim": 64, **ROPE}
WINDOW = {"kind": "attention", "name": "window", "heads": 2, "mask": "j <= i and i - j < 150", **ROPE}
LATENT = {"kind": "latent", "heads": 6, "kv_rank": 128, "rope_dim": 32, "head_dim": 32}
ODD = {"kind": "attention", "heads": 3, "kv_heads": 1, "head_dim": 40, "rope": {"dims": 12}, "score": "5 * tanh(s / 5)"}
ATTENTION = "^(cached|paged|rope|to)_"
# layers, cache, target, modules
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str, str]] = {
    "rows": ((HEADS, WINDOW), {"page": None}, "sm90", ""),
    "pages of latents and of an odd width": ((LATENT, ODD), {"page": 64}, "sm86", ATTENTION),
    "rings and latents of codes": ((WINDOW, LATENT), {"page": None, "dtype": "e4m3"}, "sm89", ATTENTION),
    "pages of codes": ((HEADS, LATENT), {"page": 64, "dtype": "e4m3"}, "sm100", ATTENTION),
}
STEP, TEXTS = {"B": 1, "T": 1, "S": 300}, {"B": 5, "T": 1, "S": 2048}


def checked(launches: list[Launch], folder: Path) -> set[str]:
    """Asserts that a GPU takes all launches. Returns the names of the kernels."""
    assert problems(launches, folder) == []
    return {launch.kernel for launch in launches}


@pytest.mark.parametrize("name", CASES)
def test_steps_of_decoding_fit_onto_gpus(name: str, tmp_path: Path) -> None:
    """One text and several; attention in parts and as a whole."""
    layers, cache, target, modules = CASES[name]
    mlp = {**MLP, "hidden": 512}
    spec = tiny(layers=(*layers, mlp), dim=256, context=2048, vocab=300, fuse=(), targets=(target,), cache=cache)
    plan = pipeline.decoding_plan(spec, target, "")
    kernels = checked(compile_plan(plan, tmp_path, (STEP, TEXTS), modules), tmp_path)
    assert any(kernel.startswith(("rope_cached_attention", "rope_paged_attention")) for kernel in kernels)
    assert ("rope_write_kernel" in kernels) == (LATENT in layers)
    assert bool(modules) or any("row_linear" in kernel for kernel in kernels)
    assert any("e4m3" in kernel for kernel in kernels) == ("dtype" in cache)


@pytest.mark.parametrize(
    ("case", "texts", "kernels"),
    [
        (Cached(shape=(12, 12, 64)), 1, 1),
        (Cached(shape=(12, 12, 64)), 64, 1),
        (Cached(shape=(32, 8, 128)), 8, 1),
        (Cached(shape=(12, 1, 576), values=512, shared=True), 1, 2),
        (Cached(shape=(12, 1, 576), values=512, shared=True), 600, 1),
    ],
)
def test_the_last_program_joins_parts_unless_they_are_many(
    case: Cached, texts: int, kernels: int, tmp_path: Path
) -> None:
    site = case.site()
    module = imported(CACHED_ATTENTION, site, tmp_path / f"cached_{texts}_{case.shape[0]}_{case.shape[2]}")
    with gpu_of(TARGETS["sm90"]) as launches:
        sizes = {"B": texts, "T": 1, "S": 2048}
        module.cached_attention(*(on_gpu(type.extents(sizes), DTYPES[type.dtype]) for type in site.inputs))
    assert checked(launches, tmp_path) <= {"cached_attention_kernel", "join_kernel"} and len(launches) == kernels
    assert [line for launch in launches for line in unequal_sums(launch.code)] == []


@pytest.mark.parametrize("length", [127, 129, 300, 2000])
def test_all_threads_have_the_same_bits_of_a_joined_sum(length: int, tmp_path: Path) -> None:
    site = Cached(shape=(8, 4, 64)).site()
    module = imported(CACHED_ATTENTION, site, tmp_path / "cached_sums")
    with gpu_of(TARGETS["sm90"]) as launches:
        sizes = {"B": 1, "T": 1, "S": length}
        module.cached_attention(*(on_gpu(type.extents(sizes), DTYPES[type.dtype]) for type in site.inputs))
    assert [line for launch in launches for line in unequal_sums(launch.code)] == []


def test_a_kernel_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    site = Cached(shape=(12, 12, 64)).site(target="sm86")
    module = imported(CACHED_ATTENTION, site, tmp_path / "cached_too_large")
    module.STAGES, module.KEYS = 4, 512
    with gpu_of(TARGETS["sm86"]) as launches:
        q, k = on_gpu((1, 1, 12, 64), torch.bfloat16), on_gpu((1, 2000, 12, 64), torch.bfloat16)
        module.cached_attention(q, k, k, on_gpu((1,), torch.int64))
        with pytest.raises(RuntimeError, match=r"[Mm]eta"):
            int(on_gpu((1,), torch.int64))  # a value of the device
    assert [launch.kernel for launch in launches] == ["cached_attention_kernel"]
    assert any("bytes of shared memory" in problem and "on sm86" in problem for problem in problems(launches, tmp_path))


def test_tokens_are_chosen_for_all_settings(tmp_path: Path) -> None:
    from specc.runtime.decode.choose_token import choose_token

    i64, f64 = torch.int64, torch.float64
    with gpu_of(TARGETS["sm90"]) as launches:
        for sampling in (Sampling(0.0), Sampling(0.7), Sampling(1.3, 40, 0.9)):
            tensors = on_gpu((3, 50304), torch.bfloat16)[:, :50257], on_gpu((16, 3), f64), on_gpu((2,), i64)
            settings = sampling.temperature, sampling.top_k, sampling.top_p
            choose_token(*tensors, on_gpu((3,), i64), on_gpu((3, 17), i64), *settings)
    assert checked(launches, tmp_path) == {"choose_token_kernel"} and len(launches) == 3


@pytest.mark.soak  # minutes for each target
@pytest.mark.parametrize("target", [name for name, target in TARGETS.items() if target.arch])
@pytest.mark.parametrize("path", sorted(SPECS.glob("*.yaml")), ids=lambda path: path.stem)
def test_all_kernels_of_a_spec_fit_onto_gpus(path: Path, target: str, tmp_path: Path) -> None:
    spec = load(path, (f"targets=[{target}, cpu]",))[0]
    window = spec.model.window
    plans = {"train": (pipeline.plan(spec, target, ""), ({"B": 2, "T": window, "S": window},))}
    if any("decode" in graph.name or "step" in graph.name for graph in plans["train"][0].programs.graphs):
        plans["decode"] = (pipeline.decoding_plan(spec, target, ""), (STEP, TEXTS))
    for name, (plan, sizes) in plans.items():
        folder = tmp_path / name
        folder.mkdir()
        checked(compile_plan(plan, folder, sizes), folder)
