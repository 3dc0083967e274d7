"""Stores texts that the final model of a run generated, so that every report of the run shows the same texts."""

from pathlib import Path

from pydantic import ValidationError

from specc.compiler.strict import StrictModel
from specc.runtime.errors import IntegrityError
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.committed import in_words

FILE = "samples.json"
HINT = "delete it; `specc report` generates it again"


class Sample(StrictModel):
    """A prompt, the seed of the random numbers, and the generated text. The seed of a greedily decoded text is None."""

    prompt: str
    text: str
    seed: int | None = None


class Samples(StrictModel):
    """The samples of a run and the settings that generated them.

    Attributes:
        step: the step of the checkpoint whose weights generated the texts.
        max_tokens: the maximum number of tokens of a text; None if the model maps lines to lines.
        temperature: the temperature of the sampling; None if the model maps lines to lines.
        samples: the samples.
    """

    step: int
    max_tokens: int | None = None
    temperature: float | None = None
    samples: tuple[Sample, ...]


def record_samples(run: Path, samples: Samples) -> None:
    """Writes the samples of a run. Raises EnvironmentFailure if the file cannot be written."""
    write_atomically(run / FILE, [(samples.model_dump_json(indent=1) + "\n").encode()])


def recorded_samples(run: Path) -> Samples | None:
    """Returns the stored samples of a run, or None. Raises IntegrityError if the file of the samples is damaged."""
    try:
        return Samples.model_validate_json((run / FILE).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrityError(f"{run / FILE}: cannot be read: {error.strerror}", HINT) from None
    except ValidationError as error:
        raise IntegrityError(f"{run / FILE}: is damaged: {in_words(error)}", HINT) from None
