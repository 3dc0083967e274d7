"""Packs quantized parameters as the artifact of a spec."""

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
    """Makes artifacts of one model. `specc` writes its resolved spec from the compiler's; a submission carries the
    text."""

    def measure(self, stored: QuantizedModel) -> int:
        """The exact bytes of the artifact of `stored`."""
        ...

    def write(self, path: Path, stored: QuantizedModel) -> ArtifactSize:
        """Writes the artifact of `stored`. Raises as `write_artifact` does."""
        ...


@dataclass(frozen=True, slots=True)
class SpecPacker:
    """The packer of a spec."""

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
