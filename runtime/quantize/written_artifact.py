"""The artifact of a quantized model: its contents and its file."""

from dataclasses import replace
from pathlib import Path

from specc.compiler.build import canonical
from specc.compiler.spec.spec import Spec
from specc.runtime.artifact.artifact import ArtifactContents, ArtifactSize, write_artifact
from specc.runtime.artifact.codecs import Codec
from specc.runtime.artifact.deployment import Deployment
from specc.runtime.artifact.quantized_model import QuantizedModel
from specc.runtime.artifact.table import described
from specc.runtime.quantize.assignment import resolved
from specc.runtime.storage.data_digests import DataDigests


def artifact_contents(spec: Spec, stored: QuantizedModel, trained_on: DataDigests | None) -> ArtifactContents:
    """Returns the contents of the artifact of a quantized model.

    The digests of the interface and the code are zeros, because only a build determines them. `write_quantized` fills
    in these digests.

    Args:
        spec: the spec of the trained run.
        stored: the quantized arrays.
        trained_on: the digests of the training data; None if unknown.
    """
    text = canonical(resolved(spec, stored.schemes)).encode()
    table = described(stored.schemes, stored.tensors)
    return ArtifactContents(text, stored.layout(), stored.tensors, table=table, trained_on=trained_on)


def write_quantized(
    path: Path, spec: Spec, stored: QuantizedModel, trained_on: DataDigests | None, codec: Codec = Codec.BROTLI
) -> ArtifactSize:
    """Writes the artifact of a quantized model.

    Args:
        path: the file to write or to replace.
        spec: the spec of the trained run.
        stored: the arrays of the artifact.
        trained_on: the digests of the training data; None if unknown.
        codec: the compression of all sections.

    Returns:
        The size of the file in bytes, by section.

    Raises:
        RunFailure: if the contents exceed a limit of the format.
        IntegrityError: if the file, when it is read back, differs from the written contents.
        EnvironmentFailure: if the file cannot be written, or `codec` is brotli and brotli is not installed.
    """
    deployment = Deployment.of(resolved(spec, stored.schemes))
    contents = artifact_contents(spec, stored, trained_on)
    return write_artifact(path, replace(contents, interface=deployment.interface, code=deployment.code), codec=codec)
