"""Format `safetensors`: the final weights of a run in f32.

The metadata contain the spec, its digest and the step.
"""

from specc.runtime.export.format import Exported, ExportFormat, ExportRequest
from specc.runtime.export.safetensors_file import export_safetensors
from specc.runtime.open_model import final_weights
from specc.runtime.storage.run_directory import Run


class SafetensorsFormat(ExportFormat):
    """The unquantized weights of a run."""

    def write(self, request: ExportRequest) -> Exported:
        run = Run.open(request.run)
        out = request.file(run, ".safetensors")
        weights, step = final_weights(run, request.say)
        about = {"name": run.spec.name, "spec_digest": run.spec_digest, "step": str(step)}
        export_safetensors(out, weights, {"format": "pt", **about})
        return Exported((out,))
