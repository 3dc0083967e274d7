"""Writes the report or the model card of a run."""

from pathlib import Path

from specc.runtime.errors import RunFailure, RuntimeFailure
from specc.runtime.log import Say
from specc.runtime.model_card import CARD, model_card
from specc.runtime.report.page import LIMIT, report_page
from specc.runtime.report.sampling import SampleOptions, samples_of
from specc.runtime.run_facts import RunFacts
from specc.runtime.storage.atomic import require_replaceable, write_atomically
from specc.runtime.storage.samples import Samples, recorded_samples

PAGE = "report.html"
NONE = "`specc report RUN` without --no-samples generates them."


def write_report(
    run: Path, out: Path | None, options: SampleOptions | None, stated: bool, say: Say, force: bool = False
) -> Path:
    """Writes the page of a run and returns its path.

    Args:
        run: the run directory.
        out: the output file; None for report.html in the run directory.
        options: the settings of new samples, if the run has no stored samples. None generates no samples.
        stated: whether the user specified the options. If not, the page may show stored samples with other settings.
        say: the function that receives messages for the user.
        force: whether to replace an existing file other than report.html in the run directory.

    Raises:
        ExportError: if `out` exists and `force` is False (exit code 2).
        RunDirectoryError: if `run` is not a run (2).
        EnvironmentFailure: if the file cannot be written (3).
        RunFailure: if the page would be larger than 2 MB (4).
        IntegrityError: if spec.json or run.json of the run is damaged (5).
    """
    facts = RunFacts.read(run)
    path = _path(out, run / PAGE, force)
    samples, reason = _samples(facts, options, stated, say)
    text = report_page(facts, samples, reason).encode()
    if len(text) > LIMIT:
        message = f"the report has {len(text):,} bytes, more than {LIMIT:,}"
        raise RunFailure(message, "show fewer or shorter samples: lower --max-tokens")
    write_atomically(path, [text])
    return path


def write_card(run: Path, out: Path | None, force: bool = False) -> Path:
    """Writes the model card of a run and returns its path.

    Args:
        run: the run directory.
        out: the output file; None for README.md in the run directory.
        force: whether to replace an existing file other than README.md in the run directory.

    Raises:
        ExportError: if `out` exists and `force` is False.
        RunDirectoryError: if `run` is not a run.
        EnvironmentFailure: if the file cannot be written.
        IntegrityError: if the run is damaged.
    """
    facts = RunFacts.read(run)
    path = _path(out, run / CARD, force)
    write_atomically(path, [model_card(facts).encode()])
    return path


def _path(out: Path | None, default: Path, force: bool) -> Path:
    path = out or default
    here = path.parent.resolve() == default.parent.resolve() and path.name == default.name
    require_replaceable(path, force or here)
    return path


def _samples(facts: RunFacts, options: SampleOptions | None, stated: bool, say: Say) -> tuple[Samples | None, str]:
    try:
        if options is not None:
            return samples_of(facts.run, facts.step, options, stated, say), ""
        stored = recorded_samples(facts.run.directory)
        return (stored, "") if stored is not None and stored.step == facts.step else (None, NONE)
    except RuntimeFailure as error:
        if stated:
            raise  # the user requested these samples
        return None, error.message
