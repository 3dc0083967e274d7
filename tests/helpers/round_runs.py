"""Runs of twelve steps on pairs of lines, the second half of them rounded for int8."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from int8_models import BY_FEATURE, LSTM, data_of
from log_lines import read_log

from specc.compiler.spec.check import load
from specc.runtime.train.loop import TrainResult
from specc.runtime.train.train import TrainOptions, train


def small(*overrides: str, model: Mapping[str, Any] = LSTM) -> Any:
    data = data_of(model, {**BY_FEATURE, "calibrate": {"sequences": 32, "batch": 16}})
    data["train"] |= {
        "data": {"kind": "polynomial", "lines": 200},
        "steps": 12,
        "batch": 8,
        "schedule": {"warmdown_fraction": 1.0},
        "qat": {"below": 0.5},
        "optimizers": [{"match": "*", "kind": "adamw", "lr": 0.01}],
    }
    data["eval"] = {"metric": "exact_match", "lines": 20, "batch": 20}
    return load(json.dumps(data), overrides)[0]


def go(folder: Path, *overrides: str, model: Mapping[str, Any] = LSTM, **more: Any) -> TrainResult:
    options = TrainOptions(small(*overrides, model=model), "cpu", "polynomial", folder, **more)
    return train(options, lambda line: None)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder / "log.jsonl") if record["event"] == "step"]
