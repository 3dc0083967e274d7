"""Folders with mutated config.json and headers, of every family: an error that names the place, and no traceback."""

import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import families as drawn
import family
import pytest
import transformers

from specc.runtime.errors import RuntimeFailure
from specc.runtime.families.config import Config, ConfigError
from specc.runtime.families.family import families
from specc.runtime.hugging_face.folder import open_folder
from specc.runtime.hugging_face.importing import ImportOptions, fitted_weights, import_folder

CONFIGS, HEADERS = 120, 80
Data = dict[str, Any]
NAMES = ("a b", "\ud800", "\x1b[2J", "__class__", "x" * 1000, "hidden_size ", "\n", "")
HOSTILE: tuple[Any, ...] = (
    *(-1, 0, 3, 2**40, 10**30, 1.5, -0.5, 1e-320, 1e308, True, None),
    *("x", "", "../../etc/passwd", "\ud800", "\x1b[31m\n\0", "é" * 70),
    *([], [1], [[[]]], [None] * 4, ["full_attention"] * 4, {}, {"a": 1}, {"rope_type": "yarn"}, {"rope_theta": None}),
    *({"rope_type": "llama3", "factor": 1e17}, {"rope_type": "linear", "factor": 1e-3}, {"full_attention": 3}),
)


@pytest.fixture(params=families(), scope="module")
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    model = family.randomized(drawn.FAMILIES[request.param].config(random.Random(3)), 3)
    model.save_pretrained(folder)
    return folder


def encoded(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass")


def other_value(config: Data, section: Data, key: str, rng: random.Random) -> bytes:
    section[key] = rng.choice(HOSTILE)
    return encoded(config)


def missing_field(config: Data, section: Data, key: str, rng: random.Random) -> bytes:
    del section[key]
    return encoded(config)


def further_field(config: Data, section: Data, key: str, rng: random.Random) -> bytes:
    section[rng.choice(NAMES)] = rng.choice(HOSTILE)
    return encoded(config)


def twice(config: Data, section: Data, key: str, rng: random.Random) -> bytes:
    again = encoded({key: rng.choice(HOSTILE)}) if section is config else b'{"a": 1, "a": 2}'
    return encoded(config)[:-1] + b", " + again[1:]


def other_bytes(config: Data, section: Data, key: str, rng: random.Random) -> bytes:
    text = bytearray(encoded(config))
    for _ in range(rng.randint(1, 4)):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text)


def no_json(config: Data, section: Data, key: str, rng: random.Random) -> bytes:
    numbers = [b"NaN", b"-Infinity", b"1" * 5000, b"0x10", b"", b'{"a":' * 100_000]
    return encoded(config).replace(b": ", b": " + rng.choice(numbers), 1)


CONFIG_CHANGES: tuple[Callable[[Data, Data, str, random.Random], bytes], ...] = (
    *(other_value, other_value, other_value, missing_field, missing_field),
    *(further_field, twice, other_bytes, no_json),
)


def refused(folder: Path, place: Path, whole: bool) -> RuntimeFailure | None:
    """The error of an import, up to the first file that it writes, or with all that it writes; None without one."""
    try:
        if whole:
            import_folder(folder, ImportOptions("model", place / "m.yaml", place / "run", "stdlib"), lambda line: None)
        else:
            fitted_weights(open_folder(folder))
    except RuntimeFailure as error:
        assert error.exit_code in (2, 5) and error.message and error.hint and not place.exists()
        return error
    return None


def test_mutated_configs(sound: Path, tmp_path: Path) -> None:
    """Each is refused, or says a model that the weights fit: that of the fields as Transformers completes them."""
    original = json.loads((sound / "config.json").read_text())
    folder, rng, count = tmp_path / "folder", random.Random(0), 0
    shutil.copytree(sound, folder)
    for i in range(CONFIGS):
        config = json.loads(json.dumps(original))
        section = rng.choice([config, *(value for value in config.values() if isinstance(value, dict) and value)])
        text = rng.choice(CONFIG_CHANGES)(config, section, rng.choice(list(section)), rng)
        (folder / "config.json").write_bytes(text)
        error = refused(folder, tmp_path / f"{i}", whole=i % 20 == 0)
        count += error is not None
        if error is None:
            assert meant_by_transformers(json.loads(text)), text
        else:
            assert str(folder) in error.message or "config.json" in error.message
    assert count >= CONFIGS // 2


def meant_by_transformers(config: Mapping[str, Any]) -> bool:
    """Whether specc reads a config as it reads the one that Transformers completes; True if Transformers refuses it."""
    known = families()[config["model_type"]]
    try:
        completed = transformers.AutoConfig.for_model(**config).to_dict()
    except Exception:  # its checks raise many classes
        return True
    return known.model(Config(config)) == known.model(Config(json.loads(json.dumps(completed, default=str))))


def test_absent_fields_are_the_defaults_of_transformers(sound: Path) -> None:
    original = json.loads((sound / "config.json").read_text())
    known = families()[original["model_type"]]
    for key in original.keys() - {"model_type"}:
        config = {name: value for name, value in original.items() if name != key}
        try:
            ours = known.model(Config(config))
        except ConfigError as error:
            assert key in error.message, (key, error.message)
            continue
        try:
            theirs = known.model(Config(transformers.AutoConfig.for_model(**config).to_dict()))
        except ConfigError:  # a default that does not fit the other sizes
            continue
        assert ours == theirs, key


def shape(header: Data, name: str, rng: random.Random) -> None:
    whole = header[name]["shape"]
    shapes: tuple[Any, ...] = ([], [1], [-1, 4], [2**62, 2**62], "x", None, [*whole, 2], [0], [True], [0] * 40)
    header[name]["shape"] = rng.choice(shapes)


def offsets(header: Data, name: str, rng: random.Random) -> None:
    start, end = header[name]["data_offsets"]
    places: tuple[Any, ...] = (
        [start, end + 4],
        [start + 4, end],
        [end, start],
        [0, 2**63],
        [start],
        "x",
        [-4, 0],
        None,
    )
    header[name]["data_offsets"] = rng.choice(places)


def dtype(header: Data, name: str, rng: random.Random) -> None:
    header[name]["dtype"] = rng.choice(("F16", "F64", "F8_E4M3", "I32", "", None, 3, "float32"))


def rename(header: Data, name: str, rng: random.Random) -> None:
    header[rng.choice((f"{name}x", *NAMES))] = header.pop(name)


def entry(header: Data, name: str, rng: random.Random) -> None:
    header[name] = rng.choice((None, [], "x", 3, {}, {"dtype": "F32"}))


HEADER_CHANGES: tuple[Callable[[Data, str, random.Random], None], ...] = (shape, offsets, dtype, rename, entry)


def test_mutated_headers(sound: Path, tmp_path: Path) -> None:
    data = (sound / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    folder, rng = tmp_path / "folder", random.Random(1)
    shutil.copytree(sound, folder)
    for i in range(HEADERS):
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
        name, change = rng.choice([key for key in header if key != "__metadata__"]), i % 8
        text = encoded(header)
        if change < len(HEADER_CHANGES):
            HEADER_CHANGES[change](header, name, rng)
            text = encoded(header)
        elif change == 5:
            body = rng.choice((body[:-1], body + b"\0", b"", body[: rng.randrange(len(body))]))
        elif change == 6:
            text = rng.choice((b"[]", b"{", b'{"a":' * 100_000, text[:-1] + b', "a": {}, "a": {}}', text + b"x"))
        stated = len(text) if change < 7 else rng.choice((2**64 - 1, 2**60, 0, len(text) - 3, len(text) + 3))
        (folder / "model.safetensors").write_bytes(stated.to_bytes(8, "little") + text + body)
        error = refused(folder, tmp_path / f"{i}", whole=i % 20 == 0)
        assert error is not None, (i, name)
        assert "safetensors" in error.message or name in error.message or "tensor" in error.message
