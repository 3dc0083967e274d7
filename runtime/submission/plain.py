"""The size of an artifact in the simpler format of parameter-golf's PR 1105, as a baseline."""

import io
from dataclasses import dataclass
from pathlib import Path

import torch

from specc.runtime.artifact.codecs import compress
from specc.runtime.open_model import read_verified
from specc.runtime.storage.quantized_run import artifact_of
from specc.runtime.submission.count import is_submission
from specc.runtime.submission.names import WEIGHTS


@dataclass(frozen=True, slots=True)
class PlainSize:
    """The sizes of the same arrays in two formats, in bytes. `artifact` is the size in the artifact, and `plain` is the
    size in the simpler format.
    """

    path: Path
    artifact: int
    plain: int

    def report(self) -> str:
        less, word = abs(1 - self.artifact / self.plain), "smaller" if self.artifact < self.plain else "LARGER"
        scheme = "one byte per value, torch.save, brotli-11 over all, no transforms"
        return f"plain scheme {self.plain:,} bytes ({scheme}); {self.path.name} {self.artifact:,}: {less:.2%} {word}"


def plain_size(path: Path) -> PlainSize:
    """Measures the arrays of an artifact, a quantized run or a submission in the format of PR 1105.

    In this format, `torch.save` writes a dict of int8 codes (one byte per code), f16 scales and all other arrays.
    Brotli compresses the result. For 30 million codes, the measurement takes minutes.

    Raises IntegrityError if the artifact is damaged. Raises RunDirectoryError or RunFailure if `path` has no artifact.
    """
    path = path / WEIGHTS if is_submission(path) else artifact_of(path, lambda _: None)
    arrays = read_verified(path).stored.tensors
    saved = io.BytesIO()
    flat = {f"{name}.{suffix}": array for name, parts in arrays.items() for suffix, array in parts.items()}
    torch.save({name: torch.from_numpy(array.copy()) for name, array in flat.items()}, saved)
    return PlainSize(path, path.stat().st_size, len(compress(saved.getvalue(), 11)))
