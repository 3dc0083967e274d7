"""Format `onnx`: a program as an ONNX file. The packages onnx and onnxruntime check and run the file.

If a model has more than `LARGEST` bytes, its weights are in a second file, because protobuf limits the size of a file.
The name of the second file contains a digest, so that a new export does not overwrite the weights of an earlier export.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.runtime.errors import IntegrityError
from specc.runtime.export.format import Exported, ExportFormat, ExportRequest
from specc.runtime.export.program import ProgramExport, compare, describe, export_program, quiet
from specc.runtime.storage.atomic import write_atomically
from specc.runtime.storage.run_directory import Run

OPSET = 20
LARGEST = 1_900_000_000  # the maximum number of bytes of a model in a single file; protobuf allows 2 GiB
SMALLEST = 1024  # the minimum number of bytes of a tensor in the second file
DATA_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.data")


class OnnxFormat(ExportFormat):
    """A graph of ONNX operations with its weights, f32."""

    options = frozenset({"program", "quantized"})

    def write(self, request: ExportRequest) -> Exported:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch.onnx needs onnxscript, and this import fails before work begins

        run = Run.open(request.run)
        out = request.file(run, ".onnx")
        program = export_program(request, run)
        model = _converted(program)
        weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
        data = _moved_out(model, out.name) if weights > LARGEST else None
        beside = None if data is None else out.with_name(data[0])
        fresh = beside is not None and not beside.exists()

        def check(temporary: Path) -> None:
            require_safe(onnx.load(str(temporary), load_external_data=False), temporary.parent)
            onnx.checker.check_model(str(temporary), full_check=True)
            session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])

            def call(inputs: Mapping[str, Tensor]) -> Tensor:
                (output,) = session.run([program.name], {name: value.numpy() for name, value in inputs.items()})
                return torch.from_numpy(output)

            compare(program, call, request.say)

        try:
            if beside is not None and data is not None:
                write_atomically(beside, [data[1]])
            write_atomically(out, [model.SerializeToString(deterministic=True)], check)
        except BaseException:
            if beside is not None and fresh:
                beside.unlink(missing_ok=True)
            raise
        for old in out.parent.glob(f"{out.name}.*.data"):  # the second file of the replaced model
            if old != beside and re.fullmatch(re.escape(out.name) + r"\.[0-9a-f]{16}\.data", old.name):
                old.unlink(missing_ok=True)
        request.say(describe(program))
        return Exported((out,) if beside is None else (out, beside))


def require_safe(model: Any, folder: Path) -> None:
    """Raises IntegrityError if an ONNX model refers to external data other than the files in `folder`.

    Each reference must name a regular file directly in `folder`, and a range of bytes within this file.
    """
    import onnx

    for tensor in _tensors(model.graph):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        facts = {entry.key: entry.value for entry in tensor.external_data}
        path = folder / facts.get("location", "")
        if not DATA_NAME.fullmatch(facts.get("location", "")) or path.is_symlink() or not path.is_file():
            message = f"{tensor.name} is stored in {facts.get('location', '')!r}, which is not a file next to the model"
            raise IntegrityError(message, "do not use this file")
        try:
            first, length = int(facts.get("offset", "0")), int(facts.get("length", "-1"))
        except ValueError:
            first, length = -1, -1
        if first < 0 or length < 0 or first + length > path.stat().st_size:
            raise IntegrityError(f"the data of {tensor.name} is not within {path.name}", "do not use this file")


def _tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _converted(program: ProgramExport) -> Any:
    """Converts a program to an ONNX model.

    The dynamic sizes have the names `batch`, `tokens` and, for a source text, `source_tokens`. Metadata that contain
    paths of this machine are removed.
    """
    from torch.export.graph_signature import InputKind

    signature = program.graph.graph_signature.input_specs
    users = [spec.arg.name for spec in signature if spec.kind == InputKind.USER_INPUT]
    shapes = {node.name: node.meta["val"].shape for node in program.graph.graph.nodes if node.name in users}
    with quiet():
        converted = torch.onnx.export(
            program.graph,
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=list(program.inputs),
            output_names=[program.name],
        )
    assert converted is not None
    model = converted.model_proto
    names: dict[str, str] = {}
    for user, name in zip(users, program.inputs, strict=True):
        rows, tokens = (str(size) for size in shapes[user])
        names[rows] = "batch"
        names.setdefault(tokens, "source_tokens" if name == "source" else "tokens")
    symbols = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = symbols.sub(lambda match: names[match[0]], dim.dim_param)
    for part in (model, model.graph, *_parts(model)):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    model.graph.name = program.spec.name
    for key, value in sorted(program.about.items()):
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    return model


def _parts(model: Any) -> Iterator[Any]:
    graph = model.graph
    yield from (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer, *model.functions)
    for function in model.functions:
        yield from function.node


def _moved_out(model: Any, name: str) -> tuple[str, bytes]:
    import onnx

    parts, offset, moved = [], 0, []
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) < SMALLEST:
            continue
        pad = -offset % 4096
        parts += [bytes(pad), tensor.raw_data]
        moved.append((tensor, offset + pad, len(tensor.raw_data)))
        offset += pad + len(tensor.raw_data)
    data = b"".join(parts)
    file = f"{name}.{hashlib.sha256(data).hexdigest()[:16]}.data"
    for tensor, first, length in moved:
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", file), ("offset", str(first)), ("length", str(length))):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value
    return file, data
