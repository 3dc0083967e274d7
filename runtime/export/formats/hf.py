"""Format `hf`: a folder that `from_pretrained` of Transformers can load."""

from specc.runtime.export.format import Exported, ExportFormat, ExportRequest
from specc.runtime.hugging_face.exporting import SHARD, ExportOptions, export_folder


class TransformersFormat(ExportFormat):
    """The final weights of a run with a config and a tokenizer of Transformers."""

    options = frozenset({"dtype", "shard_bytes"})

    def write(self, request: ExportRequest) -> Exported:
        dtype, shard = request.options.get("dtype"), request.options.get("shard_bytes", SHARD)
        options = ExportOptions(request.out, dtype, shard, request.search, request.force)
        return Exported(tuple(sorted(export_folder(request.run, options, request.say).iterdir())))
