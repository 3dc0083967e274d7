"""The model card of a run, in the format of the Hugging Face hub: YAML front matter and Markdown.

All numbers are read from the files of the run. Strings in the front matter are JSON, which is valid YAML.
"""

import json
from collections.abc import Iterator, Sequence

from specc.runtime.run_facts import RunFacts, Score
from specc.runtime.storage.records import is_number
from specc.runtime.storage.run_directory import readable

CARD = "README.md"


def model_card(facts: RunFacts, library: str = "specc", files: Sequence[tuple[str, int]] = ()) -> str:
    """Returns the text of the model card of a run.

    Args:
        facts: the facts of the run.
        library: the library that loads the files: `transformers`, or `specc`.
        files: the files in the folder of the card, with their sizes in bytes. If empty, the card lists the artifact of
            the run.
    """
    return "\n".join([*_front(facts, library), "", *_body(facts, library, files)]) + "\n"


def _front(facts: RunFacts, library: str) -> Iterator[str]:
    task = "text-generation" if facts.run.spec.model.reads == "text" else "text2text-generation"
    yield "---"
    yield f"library_name: {library}"
    yield f"pipeline_tag: {task}"
    yield f"tags: [specc, {_json(facts.run.spec.name)}]"
    scores = list(facts.scores())
    if scores:
        yield "model-index:"
        yield f"- name: {_json(facts.run.spec.name)}"
        yield "  results:"
        for score in scores:
            yield "  - task:"
            yield f"      type: {task}"
            yield "    dataset:"
            yield f"      name: {_json(f'{score.data}, {score.over}' if score.over else score.data)}"
            yield f"      type: {_json(score.data)}"
            yield "    metrics:"
            yield f"    - type: {_json(_kind(score))}"
            yield f"      name: {_json(f'{score.metric}, {score.model}')}"
            yield f"      value: {_json(score.value)}"
    yield "---"


def _body(facts: RunFacts, library: str, files: Sequence[tuple[str, int]]) -> Iterator[str]:
    run = facts.run
    yield f"# {run.spec.name}"
    yield ""
    yield f"{_plain(run.spec.model.title)}. Trained with specc, which generates the code of a model from its spec."
    yield ""
    yield "## Training"
    yield ""
    yield from _table(("", ""), list(facts.training()))
    yield ""
    yield "## Quality"
    yield ""
    scores = list(facts.scores())
    if scores:
        head = ("model", "step", "data", "over", "metric", "value")
        yield from _table(head, [_row(score) for score in scores])
    else:
        yield "The files of the run state no measured quality of these weights."
    yield ""
    yield "## Size"
    yield ""
    report = facts.quantization
    for name, size in files:
        yield f"- `{name}`: {size:,} bytes"
    if report is not None and is_number(report.get("artifact_bytes")):
        budget = f" of a budget of {report['budget_bytes']:,}" if is_number(report.get("budget_bytes")) else ""
        yield f"- quantized artifact: {report['artifact_bytes']:,} bytes{budget}"
    elif not files:
        yield "- no artifact: the run is not quantized"
    yield ""
    yield "## Use"
    yield ""
    yield from _use(library, "FILE.specc" if report is not None else "RUN")
    yield ""
    yield "## Reproduce"
    yield ""
    yield "The resolved spec below, with all overrides, is `spec.json`."
    yield ""
    yield from _fenced("sh", "\n".join(facts.commands()))
    yield ""
    yield "<details><summary>spec.json</summary>"
    yield ""
    yield from _fenced("json", readable(run.spec).rstrip())
    yield ""
    yield "</details>"


def _use(library: str, path: str) -> Iterator[str]:
    if library == "transformers":
        code = 'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("FOLDER")'
    else:
        code = f'from specc.runtime import load\n\nmodel = load("{path}")'
    yield from _fenced("python", code)


def _row(score: Score) -> Sequence[str]:
    error = "" if score.error is None else f" ± {score.error:.4f}"
    step = "" if score.step is None else f"{score.step:,}"
    return score.model, step, score.data, score.over, score.metric, f"{score.value:.4f}{error}"


def _kind(score: Score) -> str:
    return score.metric.removesuffix(", %").replace(" ", "_")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(_plain, row))} |"


def _fenced(language: str, text: str) -> Iterator[str]:
    fence = "```"
    while fence in text:
        fence += "`"
    yield f"{fence}{language}"
    yield text
    yield fence


def _plain(text: str) -> str:
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{letter}" if letter in "\\`*_[]|" else letter for letter in line)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=True)
