"""Helpers of test_adapt.py and test_adapt_ranks.py: a model that adapts, and the nats of each token.

usage: adapt_scene.py RUN DATA, in the environment of torchrun: prints the nats that each method counts, as JSON.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specc.runtime.data.windows.evaluation import Batch
from specc.runtime.distributed.world import World, joined
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.eval.text import Adapted, adapting, evaluate_adapted, evaluate_text
from specc.runtime.metrics.bits_per_byte import Account, BitsPerByte
from specc.runtime.open_model import OpenedModel, open_model

STRIDE, CHUNK = 8, 40
SLOT = {"kind": "slot", "windows": 4, "lr": 0.02}
CAUSAL = {"kind": "slot_causal", "lr": 0.02}
TTT = {"kind": "ttt", "chunk": CHUNK, "epochs": 2, "batch": 2, "optimizer": {"kind": "sgd", "lr": 0.05}}
ADAMW = {
    **TTT,
    "match": "blocks.*",
    "optimizer": {"kind": "adamw", "lr": 0.003, "weight_decay": 0.1},
    "schedule": "constant",
}
LORA = {**ADAMW, "match": "*", "lora": {"rank": 3, "scale": 6.0}, "clip_norm": None}
METHODS = {"slot": SLOT, "slot_causal": CAUSAL, "sgd": TTT, "adamw": ADAMW, "lora": LORA}
Nats = npt.NDArray[np.float64]


def opened_at(run: Path) -> OpenedModel:
    """The model of a run, with the halves of `score`."""
    return open_model(run, prepared=partial(adapting, options=EvaluateOptions(adapt="slot")))


def counted(work: Callable[[], Any]) -> Nats:
    """The nats of each target by its position, as `work` counts them; it fails where one is counted twice."""
    results: dict[int, float] = {}
    add = Account.add

    def noted(self: Account, batch: Batch, scores: Tensor) -> None:
        for at, nats in zip(
            batch.at[batch.new].tolist(), scores.detach().cpu().double().numpy()[batch.new].tolist(), strict=True
        ):
            assert at not in results, f"token {at} is scored twice"
            results[at] = nats
        add(self, batch, scores)

    Account.add = noted  # type: ignore[method-assign]
    try:
        work()
    finally:
        Account.add = add  # type: ignore[method-assign]
    assert sorted(results) == list(range(1, len(results) + 1))
    return np.array([results[at] for at in sorted(results)])


def adapted(opened: OpenedModel, settings: dict[str, Any], world: World | None = None, **options: Any) -> Adapted:
    given = EvaluateOptions(**{"stride": STRIDE, "adapt": json.dumps(settings), **options})
    return evaluate_adapted(replace(opened, spec=adapting(opened.spec, given)), given, world=world)


def plain(opened: OpenedModel, world: World | None = None, **options: Any) -> BitsPerByte:
    return evaluate_text(opened, EvaluateOptions(**{"stride": STRIDE, **options}), world=world)


def all_of(run: Path, data: Path, world: World | None) -> dict[str, float]:
    opened, where = opened_at(run), {"data": str(data), "cache": data.parent / "cache"}
    scores = {name: adapted(opened, how, world, **where).counted.nats for name, how in METHODS.items()}
    return {"plain": plain(opened, world, **where).nats, **scores}


if __name__ == "__main__":
    with joined() as here:
        print(json.dumps(all_of(Path(sys.argv[1]), Path(sys.argv[2]), here)), flush=True)
