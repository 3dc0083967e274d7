"""Format `pt2`: a program as a file that `torch.export.load` opens without specc."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specc.runtime.errors import IntegrityError
from specc.runtime.export.format import Exported, ExportFormat, ExportRequest
from specc.runtime.export.program import compare, describe, export_program
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.run_directory import Run

ABOUT = "specc.json"  # the name of the metadata in the file


class Pt2Format(ExportFormat):
    """A graph of ATen operations with its weights, f32."""

    options = frozenset({"program", "quantized"})

    def write(self, request: ExportRequest) -> Exported:
        run = Run.open(request.run)
        out = request.file(run, ".pt2")
        program = export_program(request, run)
        about = json.dumps(dict(sorted(program.about.items())))
        buffer = io.BytesIO()
        torch.export.save(program.graph, buffer, extra_files={ABOUT: about})

        def check(temporary: Path) -> None:
            stored = {ABOUT: ""}
            with temporary.open("rb") as file:
                module = torch.export.load(file, extra_files=stored).module()
            if stored[ABOUT] != about:
                raise IntegrityError(f"{out}: the file does not contain the metadata that were written")

            def call(inputs: Mapping[str, Tensor]) -> Tensor:
                output: Tensor = module(*inputs.values())
                return output

            compare(program, call, request.say)

        write_atomically(out, [buffer.getvalue()], check)
        request.say(describe(program))
        return Exported((out,))
