"""The results of evaluations in a run directory: one JSON file per task and model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specc.runtime.errors import cannot_write
from specc.runtime.storage.atomic import create_folder, write_atomically

FOLDER = "evaluations"


def record_evaluation(run: Path, facts: Mapping[str, Any]) -> Path:
    """Writes the result of an evaluation into a run directory, and returns the path of the file.

    The file replaces an earlier result for the same task file and the same model. `facts` contains the results of the
    task, and the keys `model` (`run` or `quantized`) and `step`. Raises EnvironmentFailure if the file cannot be
    written.
    """
    folder = run / FOLDER
    name = f"{Path(str(facts['file'])).stem}-{str(facts['sha256'])[:8]}-{facts['model']}.json"
    try:
        create_folder(folder)
    except OSError as error:
        raise cannot_write(folder, error) from error
    text = json.dumps(dict(facts), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(folder / name, [text.encode()])
    return folder / name


def recorded_evaluations(run: Path) -> list[dict[str, Any]]:
    """Returns all results in a run directory, sorted by file name. Files that cannot be read are omitted."""
    results = []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            results.append(json.loads(path.read_bytes()))
        except (OSError, ValueError):
            continue
    return [result for result in results if isinstance(result, dict)]


def evaluation_line(facts: Mapping[str, Any]) -> str:
    """Returns a result of an evaluation as one line of text."""
    numbers = []
    for name, measure in facts["measures"].items():
        error = measure["standard_error"]
        numbers.append(f"{name} {measure['value']:.4f}" + ("" if error is None else f" +- {error:.4f}"))
    step = f", step {facts['step']:,}" if facts.get("step") is not None else ""
    return f"{facts['file']} ({facts['task']}, {facts['model']}{step}): {', '.join(numbers)}"
