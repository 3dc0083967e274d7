"""Packers: write quantized parameters as an artifact, or measure the artifact without writing it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from specc.compiler.build import canonical
from specc.compiler.spec.spec import Spec
from specc.runtime.artifact.artifact import ArtifactContents, ArtifactSize, measured_bytes, write_artifact
from specc.runtime.artifact.codecs import Codec
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.artifact.quantized_model import QuantizedModel
from specc.runtime.artifact.table import described
from specc.runtime.quantize.schemes import resolved
from specc.runtime.storage.data_digests import DataDigests


class Packer(Protocol):
    """Writes and measures the artifacts of one model.

    The packer of `specc` computes the resolved spec with the compiler. The packer of a submission carries its text.
    """

    def measure(self, stored: QuantizedModel) -> int:
        """Returns the exact size of the artifact of `stored` in bytes."""
        ...

    def write(self, path: Path, stored: QuantizedModel) -> ArtifactSize:
        """Writes the artifact of `stored` and returns its size. Raises under the conditions of `write_artifact`."""
        ...


@dataclass(frozen=True, slots=True)
class SpecPacker:
    """A packer that computes the resolved spec of each artifact from `spec`.

    Attributes:
        spec: the spec of the trained run.
        trained_on: digests of the training data; None if they are not known.
        codec: the compression of all sections.
    """

    spec: Spec
    trained_on: DataDigests | None = None
    codec: Codec = Codec.BROTLI

    def measure(self, stored: QuantizedModel) -> int:
        return measured_bytes(self._contents(stored), codec=self.codec)

    def write(self, path: Path, stored: QuantizedModel) -> ArtifactSize:
        deployment = Deployment.of(resolved(self.spec, stored.schemes))
        contents = replace(self._contents(stored), interface=deployment.interface, code=deployment.code)
        return write_artifact(path, contents, codec=self.codec)

    def _contents(self, stored: QuantizedModel) -> ArtifactContents:
        text = canonical(resolved(self.spec, stored.schemes)).encode()
        table = described(stored.schemes, stored.tensors)
        return ArtifactContents(text, stored.layout(), stored.tensors, table=table, trained_on=self.trained_on)
