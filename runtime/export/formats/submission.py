"""Format `submission`: a folder with train_gpt.py and the weights. train_gpt.py does not need specc."""

from specc.runtime.artifact.codecs import Codec
from specc.runtime.export.format import Exported, ExportFormat, ExportRequest
from specc.runtime.submission.export import export_submission
from specc.runtime.submission.names import CODE, WEIGHTS


class SubmissionFormat(ExportFormat):
    """A submission to parameter-golf."""

    options = frozenset({"codec", "targets"})

    def write(self, request: ExportRequest) -> Exported:
        size = export_submission(
            request.run,
            request.out or request.run / "submission",
            codec=Codec[request.options.get("codec", "brotli").upper()],
            targets=request.options.get("targets", ()),
            search=request.search,
            force=request.force,
            say=request.say,
        )
        return Exported((size.path / CODE, size.path / WEIGHTS), size.total, size.budget)
