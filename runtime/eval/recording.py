"""Records evaluation results in the run directory of the model."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specc.runtime.eval.lines import ExactMatches
from specc.runtime.eval.options import EvaluateOptions
from specc.runtime.metrics.bits_per_byte import BitsPerByte
from specc.runtime.open_model import OpenedModel
from specc.runtime.storage.evaluations import record_evaluation
from specc.runtime.storage.run_directory import is_run, lasting

SETTINGS = ("window", "stride", "max_tokens", "hopeless")  # the options that change a score


def record_result(opened: OpenedModel, facts: Mapping[str, Any]) -> None:
    """Records the result `facts` in the run directory of the model. If the model is an artifact outside a run, nothing
    is recorded.

    Raises EnvironmentFailure if the file cannot be written.
    """
    run = opened.path if opened.source == "run" else opened.path.absolute().parent.parent
    if is_run(run):
        model = {"model": "run" if opened.source == "run" else "quantized", "step": opened.step}
        record_evaluation(run, {**facts, **model})


def record_score(opened: OpenedModel, options: EvaluateOptions, score: BitsPerByte | ExactMatches) -> None:
    """Records a score in the run directory of the model.

    The task name of the record consists of "data" and the settings in `options`. The score replaces an earlier score
    with the same settings and the same content of the data. Raises EnvironmentFailure if the file cannot be written.
    """
    name = lasting(options.data or opened.data or "")
    stated = {key: value for key in SETTINGS if (value := getattr(options, key)) is not None}
    digest = hashlib.sha256(json.dumps([score.digest, stated], sort_keys=True).encode()).hexdigest()
    values = {
        key: {"value": value, "standard_error": None} for key, value in score.measures().items() if value is not None
    }
    words = "".join(f", {key} {value}" for key, value in stated.items())
    data = {"file": Path(name).name, "data": name, "data_sha256": score.digest}
    record_result(opened, {"task": f"data{words}", **data, "sha256": digest, "measures": values})
