"""Small runs and models for the tests of what comes after training; the weights are random, not trained."""

import random
from pathlib import Path

import torch
from torch import Tensor

from specc.compiler import pipeline
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.model.load import Loaded
from specc.runtime.open_model import realize
from specc.runtime.storage import checkpoint
from specc.runtime.storage.checkpoint import Snapshot
from specc.runtime.storage.run_directory import Run

HELPERS = Path(__file__).parent
SPEC = HELPERS.parents[1] / "specs" / "gpt_mini.yaml"
SMALL = (
    "targets=[cpu]",
    "model.dim=32",
    "model.context=32",
    "model.blocks.count=2",
    "train.steps=3",
    "train.micro_batch=4",
    "train.tokens_per_step=128",
    "train.schedule={warmdown_steps: 1}",
    "quant.calibrate={sequences: 6, batch: 4}",
    "quant.promote.count=2",
    "eval={batch: 4}",
)
# Attention of every kind, and connections across blocks.
VARIANTS = {
    "grouped, rope over all dims": (),
    "partial rope": ("model.blocks.layers.0.rope={base: 10000, dims: 4}",),
    "window": ("model.blocks.layers.0.mask=j <= i and i - j < 5",),
    "no qk norm": (
        "model.blocks.layers.0.qk_norm=null",
        'fuse=[{"blocks.*.attention": [q.rope]}, {"blocks.*.mlp": [up, act, down]}]',
    ),
    "one head a group": ("model.blocks.layers.0.kv_heads=4",),
    "skips, scaled norms": (
        "model.blocks.count=5",
        "model.blocks.changes=[{where: 2 <= layer and layer <= 3, learn: {skip.scale: {init: 1}}, "
        "read: x + skip.scale * output(3 - layer)}]",
        "model.blocks.norm={kind: rms, scale: 1/sqrt(layer + 1)}",
        'quant.rules.1.match="*.{residual,q_gain,scale}"',
    ),
    "no fusion": ("fuse=[]",),
}
# Experts, with biases that choose them and losses of their load.
EXPERTS = (
    "model.blocks.layers.1={kind: moe, name: mlp, experts: 4, top_k: 2, hidden: 24, shared_experts: 1, "
    "act: silu(gate) * x, router: {score: sigmoid, bias: true, normalize: true}}",
    'fuse=[{"blocks.*.attention": [q.norm, q.rope, q.gain]}, {head: [logits, softcap, loss]}]',
    "train.optimizers=[{kind: sign, match: blocks.*.router_bias, lr: 0.01}, "
    '{kind: muon, match: "blocks.*.{q,k,v,out,up,gate,down}", lr: 0.02}, {kind: adamw, match: "*", lr: 0.01}]',
    'quant.rules.1.match="*.{residual,q_gain,router,router_bias}"',
)
WORDS = ("the", "of", "model", "spec", "kernel", "a", "tile", "byte", "Größe", "→")


def gpt_mini(*overrides: str) -> Spec:
    return load(SPEC, overrides)[0]


def small_spec(*overrides: str) -> Spec:
    return load(SPEC, (*SMALL, *overrides))[0]


def write_text(folder: Path, seed: int = 0) -> Path:
    """A folder with a train and a val split of made-up sentences."""
    chooser = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 30), ("val", 3)):
        texts = [" ".join(chooser.choices(WORDS, k=60)) + "\n" for _ in range(count)]
        (folder / f"{split}.txt").write_text("<|endoftext|>\n".join(texts), encoding="utf-8")
    return folder


def random_weights(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Of the size that trained weights have; none is 0 or 1, as some parameters begin."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for param in pipeline.lower(spec, "cpu").params:
        values = torch.randn(param.shape, generator=generator)
        is_matrix = len(param.shape) > 1 and param.shape[-1] > 1
        weights[param.name] = values * param.shape[-1] ** -0.5 if is_matrix else 1 + 0.2 * values
    return weights


def model_of(spec: Spec, seed: int = 0, fuse: bool = True) -> Loaded:
    """The model of `random_weights`."""
    return realize(spec, "cpu", None, random_weights(spec, seed), fuse)


def make_run(folder: Path, spec: Spec, data: str, seed: int = 0, step: int = 3) -> Run:
    """A run that ended with `random_weights`. Its plain weights are others: it averages."""
    run = Run(folder, spec, "cpu", data).create()
    add_checkpoint(run, seed, step)
    return run


def add_checkpoint(run: Run, seed: int, step: int) -> None:
    average = random_weights(run.spec, seed)
    snapshot = Snapshot(
        step=step,
        seconds=1.0,
        weights={name: torch.full_like(tensor, 7.0) for name, tensor in average.items()},
        average=average,
        optimizer={},
        rng={"cpu": torch.get_rng_state()},
        loader={},
        spec_digest=run.spec_digest,
    )
    checkpoint.save(run.checkpoints, snapshot)
