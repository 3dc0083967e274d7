"""Writes a run as a folder that `from_pretrained` of Transformers can load."""

import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.compiler.architectures.architecture import Architecture
from specc.compiler.architectures.decoder import Decoder
from specc.compiler.spec.data.text import TextData
from specc.runtime.data.errors import DataError
from specc.runtime.data.tokenizers.open import open_tokenizer
from specc.runtime.errors import IntegrityError, RuntimeFailure, cannot_write
from specc.runtime.families.config import CONFIG, HARMLESS, Config, ConfigError
from specc.runtime.families.family import Data
from specc.runtime.families.tensors import TensorMapping, expanded
from specc.runtime.hugging_face.folder import CARRIED, FLOATS, INDEX, WEIGHTS, open_folder, read_json
from specc.runtime.hugging_face.origin import Origin
from specc.runtime.hugging_face.recognizing import Recognized, decoder_of, recognized, same_programs
from specc.runtime.hugging_face.tokenizer_files import tokenizer_files
from specc.runtime.log import Say
from specc.runtime.model_card import CARD, model_card
from specc.runtime.open_model import as_trained
from specc.runtime.run_facts import RunFacts
from specc.runtime.storage.atomic import sync_folder, write_atomically
from specc.runtime.storage.run_directory import Run
from specc.runtime.storage.safetensors_stream import Entry, stream

SHARD = 5_000_000_000  # the maximum number of bytes of a weight file
DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
SPELLED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class ExportFolderError(RuntimeFailure):
    """Raised if the output folder exists and the export may not replace it (exit code 2)."""

    code = "U012"
    exit_code = 2


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options of an export.

    Attributes:
        out: the output folder; None for `NAME-hf` in the run directory.
        dtype: the dtype of the written weights: `f32`, `bf16` or `f16`. None selects the original dtypes of an imported
            run, and f32 for any other run.
        shard: the maximum size of a weight file in bytes. A tensor that exceeds this size gets a separate file.
        search: folders to search for the tokenizer.
        force: whether to replace an output folder that an earlier export wrote.
    """

    out: Path | None = None
    dtype: str | None = None
    shard: int = SHARD
    search: tuple[Path, ...] = ()
    force: bool = False


def export_folder(path: Path, options: ExportOptions, say: Say) -> Path:
    """Writes the final weights of a run, with its config, tokenizer and model card, and returns the folder.

    The folder is written under a temporary name, verified, and then renamed.

    Args:
        path: the run directory.
        options: the output folder, the dtype and the maximum size of files.
        say: the function that receives messages for the user.

    Raises:
        NoFamily: if no supported family of Transformers can represent this model (exit code 2).
        ExportFolderError: if the output folder exists and the export may not replace it (2).
        RunDirectoryError: if `path` is not a run (2).
        EnvironmentFailure: if the folder cannot be written (3).
        RunFailure: if the run has no checkpoint (4).
        IntegrityError: if the run is damaged, or the written files do not contain the weights of the run (5).
    """
    run, weights, _ = as_trained(Run.open(path), say)
    out = options.out or run.directory / f"{run.spec.name}-hf"
    _require_free(out, options.force)
    origin = Origin.of(run)
    model = run.spec.model.after(1.0)
    blocks = model.blocks.count if isinstance(model, Decoder) else 0
    carried = read_json(run.files / CONFIG) if (run.files / CONFIG).is_file() else None
    match = recognized(model, str(carried.get("model_type", "")) if carried else "")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if carried is not None and _describes(match, carried, model):
        fields, text = carried, (run.files / CONFIG).read_bytes()
        if options.dtype is not None:
            fields = fields | {"dtype": SPELLED[DTYPES[options.dtype]]}
            text = _json(fields)
    else:
        fields = _new_config(run, match, carried, origin, options)
        text = _json(fields)
    rows = expanded(match.family.table(Config(fields)), shapes, blocks)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        _write(temporary / CONFIG, text)
        for name, content in _companions(run, options, say).items():
            _write(temporary / name, content)
        stated = DTYPES.get(options.dtype or "")
        dtypes = {name: stated or origin.dtype_of(name) for row in rows for name in row.tensors}
        _write_weights(temporary, rows, weights, dtypes, options.shard)
        _compare(temporary, rows, weights, dtypes)
        sizes = [(file.name, file.stat().st_size) for file in sorted(temporary.iterdir())]
        _write(temporary / CARD, model_card(RunFacts.read(path), "transformers", sizes).encode())
        sync_folder(temporary)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise cannot_write(out, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def write_model(folder: Path, model: Architecture, weights: Mapping[str, Tensor], dtype: str) -> None:
    """Writes config.json and the weights of a model, but no tokenizer and no model card.

    Args:
        folder: an existing folder.
        model: the model of a spec.
        weights: the parameters in f32, by name.
        dtype: the dtype of the written tensors: `f32`, `bf16` or `f16`.

    Raises:
        NoFamily: if no supported family of Transformers can represent this model (exit code 2).
    """
    match = recognized(model)
    assert isinstance(model, Decoder)
    fields = {"architectures": [match.family.architecture], "model_type": match.family.name, **match.config}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    rows = expanded(match.family.table(Config(fields)), shapes, model.blocks.count)
    _write(folder / CONFIG, _json(fields | {"dtype": SPELLED[DTYPES[dtype]]}))
    _write_weights(folder, rows, weights, {name: DTYPES[dtype] for row in rows for name in row.tensors}, SHARD)


def _require_free(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise ExportFolderError(f"{out} exists", "name another folder with --out, or replace it with --force")
    known = {*CARRIED, INDEX, WEIGHTS, CARD}
    other = not out.is_dir() or out.is_symlink() or not (out / CONFIG).is_file()
    strange = [] if other else [e.name for e in out.iterdir() if e.name not in known and e.suffix != ".safetensors"]
    if other or strange:
        what = (
            f"has {sorted(strange)[0]}, which is not a file of an export" if strange else "exists, and is not an export"
        )
        raise ExportFolderError(f"{out} {what}", "name another folder with --out")


def _describes(match: Recognized, config: Data, model: Any) -> bool:
    try:
        return config.get("model_type") == match.family.name and same_programs(model, decoder_of(match.family, config))
    except ConfigError:
        return False


def _new_config(run: Run, match: Recognized, carried: Data | None, origin: Origin, options: ExportOptions) -> Data:
    fields: Data = {"architectures": [match.family.architecture], "model_type": match.family.name}
    if carried is not None and carried.get("model_type") == match.family.name:
        fields |= {key: value for key, value in carried.items() if key in HARMLESS}
    else:
        fields |= dict.fromkeys(("bos_token_id", "eos_token_id"), _separator(run, options)) | {"pad_token_id": None}
    dtype = DTYPES[options.dtype] if options.dtype is not None else origin.dtype
    fields.pop("torch_dtype", None)
    return fields | match.config | {"dtype": SPELLED[dtype]}


def _separator(run: Run, options: ExportOptions) -> int | None:
    data = run.spec.train.data
    if not isinstance(data, TextData):
        return None
    try:
        return open_tokenizer(data, (run.files, *options.search)).bos
    except DataError:
        return None


def _companions(run: Run, options: ExportOptions, say: Say) -> Mapping[str, bytes]:
    """Returns the tokenizer files and the generation settings, by file name.

    If the run was imported with tokenizer files, these files are returned unchanged. Otherwise, the function converts
    the tokenizer of the spec.
    """
    carried = {name: (run.files / name).read_bytes() for name in CARRIED[1:] if (run.files / name).is_file()}
    if any(name.startswith("tokenizer.") or name == "vocab.json" for name in carried):
        return carried
    try:
        written = tokenizer_files(run.spec, (run.files, *options.search))
    except DataError as error:
        say(f"the folder has no tokenizer: {error.message}")
        return carried
    if not written:
        say("the folder has no tokenizer: Transformers cannot represent the tokenizer of the run")
    return {**carried, **written}


def _write_weights(
    folder: Path, rows: Sequence[TensorMapping], weights: Mapping[str, Tensor], dtypes: Mapping[str, str], shard: int
) -> None:
    files: list[list[Entry]] = [[]]
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for row in rows:
        for name, shape in row.shapes(shapes).items():
            entry = Entry(name, FLOATS[dtypes[name]], shape)
            if files[-1] and sum(other.size for other in files[-1]) + entry.size > shard:
                files.append([])
            files[-1].append(entry)
    row_of = {name: row for row in rows for name in row.tensors}

    def read(name: str) -> Tensor:
        return joined(row_of[name], weights)[name].to(FLOATS[dtypes[name]])

    several, placed = len(files) > 1, dict[str, str]()
    for i, entries in enumerate(files):
        file = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" if several else WEIGHTS
        placed |= {entry.name: file for entry in entries}
        ordered = sorted(
            entries, key=lambda entry: -entry.dtype.itemsize
        )  # sorted by item size, so that each tensor starts at a multiple of its item size
        write_atomically(folder / file, stream(ordered, read, {"format": "pt"}))
    if several:
        total = sum(entry.size for entries in files for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
        _write(folder / INDEX, _json(index))


def joined(row: TensorMapping, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(row.tensors, row.join([weights[name] for name in row.parameters]), strict=True))


def _compare(
    folder: Path, rows: Sequence[TensorMapping], weights: Mapping[str, Tensor], dtypes: Mapping[str, str]
) -> None:
    stored = open_folder(folder).tensors
    for row in rows:
        for name, tensor in joined(row, weights).items():
            wanted = tensor.to(FLOATS[dtypes[name]]).contiguous()
            if name not in stored or not torch.equal(_bytes(stored[name].read()), _bytes(wanted)):
                message = f"{folder}: the file does not contain {name} as it was written"
                raise IntegrityError(message, "check disk and memory")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, [content])


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
