"""The results of evaluations in a run directory: one JSON file per task and model."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specc.runtime.errors import cannot_write
from specc.runtime.storage.atomic import create_folder, write_atomically
from specc.runtime.storage.records import is_number

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


def recorded_evaluations(run: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns all results in a run directory, sorted by file name.

    Damaged files are omitted. The function calls `say` with a message for each.
    """
    results = []
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            result = json.loads(path.read_bytes())
        except (OSError, ValueError):
            result = None
        if _is_result(result):
            results.append(result)
        else:
            say(f"{path}: is not a valid result of `specc eval`; score the model again")
    return results


def _is_result(result: object) -> bool:
    if not isinstance(result, dict) or not isinstance(measures := result.get("measures"), dict):
        return False
    return (
        all(isinstance(result.get(name), str) for name in ("file", "task", "sha256", "model"))
        and (result.get("step") is None or is_number(result["step"]))
        and all(isinstance(measure, dict) and is_number(measure.get("value")) for measure in measures.values())
        and all(m.get("standard_error") is None or is_number(m["standard_error"]) for m in measures.values())
    )


def evaluation_line(facts: Mapping[str, Any]) -> str:
    """Returns a result of an evaluation as one line of text."""
    numbers = []
    for name, measure in facts["measures"].items():
        error = measure.get("standard_error")
        numbers.append(f"{name} {measure['value']:.4f}" + ("" if error is None else f" +- {error:.4f}"))
    step = f", step {facts['step']:,}" if facts.get("step") is not None else ""
    return f"{facts['file']} ({facts['task']}, {facts['model']}{step}): {', '.join(numbers)}"
