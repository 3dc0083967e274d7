"""Converts a folder of Transformers to a spec, and to a run that starts from the weights in the folder."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.errors import SpeccError, SpecError
from specc.compiler.generated_folder import replace_file
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.runtime.data.tokenizers.byte_level import ByteTokenizer
from specc.runtime.errors import IntegrityError
from specc.runtime.families.config import CONFIG, Config, ConfigError, require_known
from specc.runtime.families.family import Data, Family, families
from specc.runtime.families.tensors import TensorMapping, expanded
from specc.runtime.hugging_face.folder import FLOATS, Folder, open_folder
from specc.runtime.hugging_face.origin import Origin
from specc.runtime.hugging_face.starting_spec import checked_model, written_spec
from specc.runtime.hugging_face.tokenizer_files import is_byte_level
from specc.runtime.log import Say
from specc.runtime.model.load import choose_target
from specc.runtime.storage import checkpoint, committed
from specc.runtime.storage.atomic import create_folder
from specc.runtime.storage.run_directory import Run, default_run, lasting, locked, require_free
from specc.runtime.storage.safetensors_stream import Entry, stream

NOT_OF_CONFIG = "the weights do not belong to this config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")  # the import uses the first of these files that the folder contains


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """The options of an import.

    Attributes:
        name: the name of the spec; None for the name of the folder.
        spec: the path of the written spec; None for `specs/NAME.yaml`.
        run: the run directory; None for the next free `runs/NAME-NNN`.
        data: the data of the run, in the format of `specc train --data`; None for the default data.
        overrides: texts `path=value`. Each text replaces a value in the spec of the run. The written spec file does not
            contain the overrides.
        ignored: the names of unknown fields of config.json that the user allows.
    """

    name: str | None = None
    spec: Path | None = None
    run: Path | None = None
    data: str | None = None
    overrides: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import.

    Attributes:
        family: the family of the model.
        spec: the spec in the run.
        path: the path of the written spec file.
        run: the run directory.
        ignored: the names of the fields of config.json that the import ignored, because they do not change the function
            of the model.
        parameters: the number of parameters.
    """

    family: Family
    spec: Spec
    path: Path
    run: Path
    ignored: tuple[str, ...]
    parameters: int


def import_folder(path: Path, options: ImportOptions, say: Say) -> Imported:
    """Writes a spec, and a run whose checkpoint of step 0 contains the weights of the folder.

    Tensors are read one at a time and written immediately, so that the whole model is never in memory.

    Args:
        path: a folder with config.json and safetensors files.
        options: the names and paths of the written files.
        say: the function that receives messages for the user.

    Raises:
        ConfigError: if the folder has no model, or specc lacks a feature of the model (exit code 2).
        RunDirectoryError: if the run directory is not empty (2).
        EnvironmentFailure: if a file cannot be written (3).
        IntegrityError: if a file of the folder is damaged, or does not match config.json (5).
    """
    folder = open_folder(path)
    name = options.name or _slug(path)
    tokenizer = next((file for file in TOKENIZERS if (path / file).is_file()), TOKENIZERS[0])
    if (path / tokenizer).is_file() and is_byte_level(path / tokenizer):
        tokenizer = ByteTokenizer.name
    fitted = fitted_weights(folder, name, tokenizer, options.ignored)
    family, rows, shapes = fitted.family, fitted.rows, fitted.shapes
    origin = "".join(char for char in path.absolute().name if char.isascii() and char.isprintable())
    comment = f"{family.title}, imported from {origin}. {sum(map(prod, shapes.values())):,} parameters."
    text = written_spec(name, fitted.section, shapes, tokenizer, comment)
    place = options.spec or Path("specs") / f"{name}.yaml"
    _require_writable(place, text)
    try:
        spec = load(text, options.overrides)[0]
    except SpecError as error:
        raise ConfigError(f"the spec of {path} is invalid: {error.diagnostics[0].message}", "change --set") from None
    if spec.model != fitted.model:
        raise ConfigError("--set changes the model, and the weights no longer fit it", "override other fields")
    directory = options.run or default_run(spec.name)
    require_free(directory)
    with locked(directory):
        data = lasting(options.data or spec.train.data.usual)
        run = Run(directory, spec, choose_target(spec, None), data, options.overrides)
        create_folder(run.checkpoints)
        entries = [Entry(key, torch.float32, shapes[key]) for row in rows for key in row.parameters]
        if (left := checkpoint.path_of(run.checkpoints, 0)).exists():  # an interrupted import has left this checkpoint
            committed.discard(left)
        checkpoint.save_weights(run.checkpoints, stream(entries, fitted.read), run.spec_digest)
        run.create(folder.carried)
        Origin.from_dtypes({name: folder.tensors[name].dtype for row in rows for name in row.tensors}).write(run)
        if not place.exists():
            create_folder(place.parent)
            replace_file(place, text)
    count = sum(entry.size for entry in entries) // torch.float32.itemsize
    return Imported(family, spec, place, directory, fitted.ignored, count)


def family_of(config: Config) -> Family:
    """Returns the family that a config names. Raises ConfigError if specc does not support this family."""
    known = families()
    if config.stated("quantization_config"):
        message = "the weights are quantized by another program"
        raise config.error("quantization_config", message, "import the model in bf16 and quantize it with specc")
    needed = "specc imports only these models; docs/families.md shows how to write a spec for a similar model"
    return config.choice("model_type", "", known, needed)


def _slug(path: Path) -> str:
    text = re.sub(r"[^a-z0-9]+", "_", path.absolute().name.lower()).strip("_")
    return (text if text[:1].isalpha() else f"model_{text}")[:64].rstrip("_")


def _require_writable(place: Path, text: str) -> None:
    if place.exists() and (not place.is_file() or place.read_text(encoding="utf-8") != text):
        raise SpeccError(f"{place} exists, and contains another spec", "choose another --name, or --spec FILE")


def matched_rows(
    family: Family, config: Config, shapes: Mapping[str, tuple[int, ...]], blocks: int, folder: Folder
) -> list[TensorMapping]:
    """Returns the tensor mappings of all parameters, and checks that the folder has exactly the mapped tensors.

    Args:
        family: the family of the model.
        config: the config of the model.
        shapes: the shapes of the parameters, by name.
        blocks: the number of blocks of the model.
        folder: the folder with the tensors.

    Raises:
        IntegrityError: if the folder lacks a tensor, has a tensor that belongs to no parameter, or has a tensor of a
            wrong shape.
        ConfigError: if a tensor has a dtype that specc cannot read.
    """
    rows = expanded(family.table(config), shapes, blocks)
    bare = family.prefix and not any(name.startswith(family.prefix) for name in folder.tensors)
    if bare:
        rows = [row.named(lambda name: name.removeprefix(family.prefix)) for row in rows]
    read: set[str] = set()
    for row in rows:
        if missing := next((name for name in row.tensors if name not in folder.tensors), None):
            raise IntegrityError(f"{folder.path}: has no tensor {missing} for {row.parameters[0]}", NOT_OF_CONFIG)
        for name, shape in row.shapes(shapes).items():
            stored = folder.tensors[name]
            if stored.shape != shape:
                message = f"{name} is {list(stored.shape)}, but {CONFIG} requires {list(shape)}"
                raise IntegrityError(f"{stored.file}: {message}", NOT_OF_CONFIG)
            if stored.dtype not in FLOATS:
                message = f"{stored.file}: {name} is {stored.dtype}; specc reads {', '.join(FLOATS)}"
                raise ConfigError(message, "convert the weights to bf16")
        read.update(row.tensors)
    for name in sorted(folder.tensors.keys() - read):
        plain = f"{family.prefix}{name}" if bare else name
        if not any(fnmatchcase(plain, pattern) for pattern in family.buffers) and not _is_tied(folder, name, rows):
            raise IntegrityError(
                f"{folder.path}: the tensor {name} belongs to no parameter of the model", NOT_OF_CONFIG
            )
    return rows


def _is_tied(folder: Folder, name: str, rows: Sequence[TensorMapping]) -> bool:
    table = next(row.tensors[0] for row in rows if row.parameters[0] == "embed.token")
    head, stored = folder.tensors[name], folder.tensors[table]
    same = (head.dtype, head.shape) == (stored.dtype, stored.shape) and name.rpartition(".")[2] == "weight"
    return same and head.dtype in FLOATS and torch.equal(head.read(), stored.read())


class FittedWeights:
    """The weights of a folder, converted to the f32 parameters of a model.

    The tensors are read on demand: `read` returns a parameter, and reads the tensors that contain this parameter.

    Attributes:
        family: the family of the model.
        section: the section `model` of a spec, converted from config.json.
        model: the model that `section` describes.
        shapes: the shapes of the parameters, by name.
        rows: the tensor mappings of the parameters.
        ignored: the names of the fields of config.json that do not change the function of the model.
    """

    kind: Literal["hugging_face"] = "hugging_face"
    step: int | None = None
    spec: Spec | None = None

    def __init__(
        self,
        folder: Folder,
        family: Family,
        section: Data,
        model: Decoder,
        rows: Sequence[TensorMapping],
        ignored: Sequence[str],
    ) -> None:
        self.family, self.section, self.model, self.rows = family, section, model, rows
        self.ignored = tuple(ignored)
        self.shapes = {param.name: param.shape for param in model.lower("model").params}
        self._row = {name: row for row in rows for name in row.parameters}
        self._folder, self._ready = folder, dict[str, Tensor]()

    def read(self, name: str) -> Tensor:
        """Returns a parameter.

        If a tensor contains several parameters, the other parameters are cached until `read` returns them.

        Raises IntegrityError if a tensor is damaged, or contains NaN or infinity.
        """
        if name not in self._ready:
            row = self._row[name]
            self._ready |= zip(row.parameters, row.split([self._finite(key) for key in row.tensors]), strict=True)
        return self._ready.pop(name)

    def _finite(self, key: str) -> Tensor:
        stored = self._folder.tensors[key]
        tensor = stored.read().float()
        if not bool(torch.isfinite(tensor).all()):
            raise IntegrityError(
                f"{stored.file}: {key} has NaN or infinity", "start from weights without NaN and infinity"
            )
        return tensor


def fitted_weights(
    folder: Folder, name: str = "model", tokenizer: str = TOKENIZERS[0], ignored: Sequence[str] = ()
) -> FittedWeights:
    """Returns the weights of a folder, converted to the parameters of the model in config.json.

    Args:
        folder: the folder with config.json and the weights.
        name: the name of the spec.
        tokenizer: the tokenizer of the spec.
        ignored: the names of unknown fields of config.json that the user allows.

    Raises:
        ConfigError: if specc lacks a feature of the model.
        IntegrityError: if the weights do not match config.json.
    """
    config = Config(folder.config, str(folder.path / CONFIG))
    family = family_of(config)
    section = family.model(config)
    without_effect = require_known(config, family.name, ignored)
    if len(folder.tensors) < section["blocks"]["count"]:
        count = section["blocks"]["count"]
        message = f"{count:,} layers, but the folder has only {len(folder.tensors):,} tensors"
        raise IntegrityError(f"{folder.path}: {message}", NOT_OF_CONFIG)
    model = checked_model(name, section, tokenizer)
    shapes = {param.name: param.shape for param in model.lower(name).params}
    rows = matched_rows(family, config, shapes, model.blocks.count, folder)
    return FittedWeights(folder, family, section, model, rows, without_effect)
