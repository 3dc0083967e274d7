"""Generates the samples of a report with the final weights of a run, and stores them in the run."""

from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path

from specc.compiler.spec.data.lines import file_settings
from specc.runtime.data.lines.line_file import LineFile
from specc.runtime.data.lines.task import task_of
from specc.runtime.decode.lines import translator_of
from specc.runtime.decode.sampling import Sampling
from specc.runtime.generate import generate
from specc.runtime.log import Say
from specc.runtime.open_model import OpenedModel, open_model
from specc.runtime.storage.run_directory import Run
from specc.runtime.storage.samples import Sample, Samples, record_samples, recorded_samples

LINES = 4  # the number of lines of the validation split that are used if the user gives no prompts


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """The settings of the samples in a report.

    Attributes:
        prompts: the prompts, or the source lines for a model that maps lines to lines. Without prompts, a text model
            continues the empty prompt with two seeds, and a model of lines translates the first lines of the validation
            split.
        seed: the seed of the random numbers for each prompt.
        max_tokens: the maximum number of tokens of a text.
        temperature: the temperature of the sampling.
        target: a target of the spec. None selects the best target that this machine can run.
        search: folders to search for the tokenizer.
    """

    prompts: tuple[str, ...] = ()
    seed: int = 0
    max_tokens: int = 200
    temperature: float = 0.8
    target: str | None = None
    search: tuple[Path, ...] = ()


def samples_of(run: Run, step: int | None, options: SampleOptions, stated: bool, say: Say) -> Samples:
    """Returns the stored samples of a run, if their step is `step` and their settings equal `options`. Otherwise,
    generates and stores new samples.

    Args:
        run: the run.
        step: the step of the newest checkpoint; None if the run has no checkpoint.
        options: the settings of the samples.
        stated: whether the user specified the options. If not, the function accepts stored samples with other settings.
        say: the function that receives messages for the user.

    Raises:
        RuntimeFailure: if the model cannot be opened, or cannot generate text.
        EnvironmentFailure: if the samples cannot be stored.
    """
    stored, lines = recorded_samples(run.directory), run.spec.model.reads == "lines"
    if stored is not None and stored.step == step and (not stated or _fits(stored, options, lines)):
        return stored
    opened = open_model(run.directory, options.target, search=options.search, say=say)
    samples = _lines(opened, options) if lines else _texts(opened, options)
    record_samples(run.directory, samples)
    return samples


def _fits(stored: Samples, options: SampleOptions, lines: bool) -> bool:
    shown = [(sample.prompt, sample.seed) for sample in stored.samples]
    if lines:
        return shown == [(prompt, None) for prompt in options.prompts] or not options.prompts
    settings = (options.max_tokens, options.temperature)
    return shown == _asked(options) and (stored.max_tokens, stored.temperature) == settings


def _asked(options: SampleOptions) -> list[tuple[str, int]]:
    if options.prompts:
        return [(prompt, options.seed) for prompt in options.prompts]
    return [("", options.seed), ("", options.seed + 1)]


def _texts(opened: OpenedModel, options: SampleOptions) -> Samples:
    samples = []
    for prompt, seed in _asked(options):
        text = generate(opened, prompt, options.max_tokens, Sampling(options.temperature), seed)
        samples.append(Sample(prompt=prompt, text=text.decode(errors="replace"), seed=seed))
    return Samples(
        step=opened.step or 0, max_tokens=options.max_tokens, temperature=options.temperature, samples=tuple(samples)
    )


def _lines(opened: OpenedModel, options: SampleOptions) -> Samples:
    sources = list(options.prompts) or _validation_lines(opened)
    targets = translator_of(opened).translate(sources)
    pairs = zip(sources, targets, strict=True)
    return Samples(step=opened.step or 0, samples=tuple(Sample(prompt=source, text=target) for source, target in pairs))


def _validation_lines(opened: OpenedModel) -> list[str]:
    task = task_of(opened.spec.train.data)
    if task is not None and opened.data == task.name:
        codes, _ = task.held_out(task.splits[0], LINES).sides()
        return ["".join(chr(code) for code in row if code) for row in codes.tolist()]
    settings = file_settings(opened.spec.train.data)
    file = LineFile.read(str(opened.data), settings, opened.characters, opened.spec.model.window)
    return list(islice(compress(file.sources, file.held_out), LINES))
