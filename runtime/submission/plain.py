"""The bytes of an artifact's arrays by the plain scheme that parameter-golf's PR 1105 ships, to compare with."""

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
    """Bytes of the same arrays, decimal: `own` of the artifact, all of the file; `plain` by the plain scheme."""

    path: Path
    own: int
    plain: int

    def report(self) -> str:
        """For people."""
        less, word = abs(1 - self.own / self.plain), "smaller" if self.own < self.plain else "LARGER"
        scheme = "one byte a value, torch.save, brotli-11 over all, no transforms"
        return f"plain scheme {self.plain:,} bytes ({scheme}); {self.path.name} {self.own:,}: {less:.2%} {word}"


def plain_size(path: Path) -> PlainSize:
    """Compresses the arrays of an artifact, a quantized run or a submission as PR 1105 does: a dict of int8 codes, f16
    scales and the rest, one byte a code, by `torch.save`, then brotli of quality 11 in one stream. Of 30 million codes
    that takes minutes. Raises as `specc.runtime.open_model.read_verified`."""
    path = path / WEIGHTS if is_submission(path) else artifact_of(path, lambda _: None)
    arrays = read_verified(path).stored.tensors
    saved = io.BytesIO()
    flat = {f"{name}.{suffix}": array for name, found in arrays.items() for suffix, array in found.items()}
    torch.save({name: torch.from_numpy(array.copy()) for name, array in flat.items()}, saved)
    return PlainSize(path, path.stat().st_size, len(compress(saved.getvalue(), 11)))
