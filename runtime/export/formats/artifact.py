"""Format `artifact`: a copy of the artifact that `specc quantize` wrote."""

from pathlib import Path

from specc.runtime.errors import IntegrityError
from specc.runtime.export.format import Exported, ExportFormat, ExportRequest
from specc.runtime.open_model import read_verified
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.quantized_run import quantized_artifact
from specc.runtime.storage.run_directory import Run


class ArtifactFormat(ExportFormat):
    """The quantized artifact of a run, verified before and after it is copied."""

    def write(self, request: ExportRequest) -> Exported:
        run = Run.open(request.run)
        out = request.file(run, ".specc")
        source = quantized_artifact(run, request.say)
        data = source.read_bytes()
        read_verified(source)

        def check(temporary: Path) -> None:
            read_verified(temporary)
            if temporary.read_bytes() != data:
                raise IntegrityError(f"{out}: the file does not contain what was written", "check disk and memory")

        write_atomically(out, [data], check)
        return Exported((out,))
