"""Folders that specc does not import: each is refused by name, with exit code 2 or 5."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families_of_llama
import family
import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.compiler.spec.start import StartSpec
from specc.runtime.errors import RuntimeFailure
from specc.runtime.families.config import Config, ConfigError, require_known
from specc.runtime.families.family import families
from specc.runtime.hugging_face import starting_spec
from specc.runtime.hugging_face.importing import ImportOptions, import_folder
from specc.runtime.open_model import realize
from specc.runtime.storage import checkpoint
from specc.runtime.weights.source import StartError
from specc.runtime.weights.start import start_from

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 64}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "mish"}, "hidden_act"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"residual_multiplier": 0.2}, "residual_multiplier"),
    ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.rope_theta"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("qwen3_moe", {"mlp_only_layers": [7], "num_experts_per_tok": 2}, "mlp_only_layers"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "num_experts_per_tok": 2}, "topk_method"),
    ("deepseek_v2", {"scoring_func": "sigmoid", "num_experts_per_tok": 2}, "scoring_func"),
]


@pytest.mark.parametrize(("name", "fields", "path"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_setting_that_specc_lacks_is_named(name: str, fields: dict[str, Any], path: str) -> None:
    config = Config({**SIZES, **fields})
    with pytest.raises(ConfigError) as caught:
        families()[name].model(config)
        require_known(config, name)
    assert caught.value.message.startswith("config.json: ") and path in caught.value.message and caught.value.hint


def test_a_field_without_effect_is_ignored_and_an_unknown_one_where_the_user_says_so() -> None:
    config = Config({**SIZES, "use_cache": True, "secret": 3, "empty": None})
    families()["llama"].model(config)
    with pytest.raises(ConfigError, match="secret: 3"):
        require_known(config, "llama")
    assert require_known(config, "llama", ["secret"]) == ["empty", "secret", "use_cache"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    family.randomized(families_of_llama.FAMILIES["llama"].config(random.Random(3)), 3).save_pretrained(folder)
    return folder


def refusal(folder: Path, place: Path) -> RuntimeFailure | None:
    """The error of an import; None if the folder is imported."""
    options = ImportOptions("model", place / "model.yaml", place / "run", "stdlib")
    try:
        import_folder(folder, options, lambda line: None)
    except RuntimeFailure as error:
        assert (error.exit_code in (2, 5) and error.message and str(folder) in error.message) or "json" in error.message
        assert not (place / "run" / "spec.json").exists() and not (place / "model.yaml").exists()
        return error
    return None


def test_a_run_can_start_from_a_folder(sound: Path, tmp_path: Path) -> None:
    """In whole and by name, with the values that an import gives; a misfit is named by the parameter."""
    imported = import_folder(sound, ImportOptions("model", tmp_path / "m.yaml", tmp_path / "run", "stdlib"), print)
    wanted = checkpoint.weights(checkpoint.all_in(imported.run / "checkpoints")[0])
    model = realize(imported.spec, "cpu", None, 5).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole, part = StartSpec(path=str(sound)), StartSpec(path=str(sound), take=("*.attention.*",))
    record = start_from(part, model, imported.spec, print)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name] if ".attention." in name else before[name])
    assert record.kind == "hugging_face" and len(record.tensors) < len(wanted)
    start_from(whole, model, imported.spec, print)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    model.extra = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(StartError, match="lacks extra"):
        start_from(whole, model, imported.spec, print)


HOSTILE = (-1, 0, 3, 2**40, 1.5, -0.5, True, "x", "", [], [1], {}, {"a": 1}, None, 10**30, [[[]]])


def test_mutated_configs_are_refused_by_name(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation is refused with its field, or makes another model that the weights fit, such as one of another eps."""
    monkeypatch.setattr(starting_spec, "_buildable", lambda data: data)  # planning takes most of the time
    rng = random.Random(0)
    original = json.loads((sound / "config.json").read_text())
    sections = [(key,) for key in original] + [("rope_parameters", key) for key in original["rope_parameters"]]
    shutil.copytree(sound, tmp_path / "folder")
    refused = 0
    for i in range(100):
        config = json.loads(json.dumps(original))
        *outer, key = rng.choice(sections)
        inner = config[outer[0]] if outer else config
        change = rng.randrange(3)
        if change == 2:
            inner[f"{key}_2"] = rng.choice(HOSTILE[:9])
        elif change == 1:
            inner.pop(key)
        else:
            inner[key] = rng.choice(HOSTILE)
        (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
        error = refusal(tmp_path / "folder", tmp_path / f"{i}")
        refused += error is not None
    assert refused >= 40


def _shape(entry: dict[str, Any], rng: random.Random) -> None:
    entry["shape"] = rng.choice(([], [1], [-1, 4], [2**62, 2**62], "x", None, [*entry["shape"], 2], [0]))


def _offsets(entry: dict[str, Any], rng: random.Random) -> None:
    start, end = entry["data_offsets"]
    entry["data_offsets"] = rng.choice(
        ([start, end + 4], [start + 4, end], [end, start], [0, 2**63], [start], "x", [-4, 0])
    )


def _dtype(entry: dict[str, Any], rng: random.Random) -> None:
    entry["dtype"] = rng.choice(("F16", "F64", "F8_E4M3", "I32", "", None, 3, "float32"))


MUTATIONS: tuple[Callable[[dict[str, Any], random.Random], None], ...] = (_shape, _offsets, _dtype)


def test_mutated_headers_are_refused_by_file_or_tensor(sound: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    folder = tmp_path / "folder"
    shutil.copytree(sound, folder)
    data = (sound / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for i in range(100):
        header = json.loads(data[8 : 8 + length])
        name = rng.choice([key for key in header if key != "__metadata__"])
        body, change = data[8 + length :], i % 6
        if change < 3:
            MUTATIONS[change](header[name], rng)
        elif change == 3:
            header[f"{name}x"] = header.pop(name)
        elif change == 4:
            header[name] = rng.choice((None, [], "x", 3, {}))
        else:
            body = rng.choice((body[:-1], body + b"\0", b"", body[: rng.randrange(len(body))]))
        text = json.dumps(header).encode()
        stated = rng.choice((len(text), len(text), 2**60, 0, len(text) - 3)) if i % 10 == 9 else len(text)
        (folder / "model.safetensors").write_bytes(stated.to_bytes(8, "little") + text + body)
        error = refusal(folder, tmp_path / f"{i}")
        assert error is not None, (i, name)
        assert "safetensors" in error.message or name in error.message or "tensor" in error.message


def test_what_could_run_code_or_leave_the_folder_is_refused(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(sound, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refusal(folder, tmp_path / "a")
    assert error is not None and "pickle" in error.message and "save_pretrained" in error.hint
    index = {"weight_map": {"model.norm.weight": "../sound.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    error = refusal(folder, tmp_path / "b")
    assert error is not None and error.exit_code == 5 and "../sound.safetensors" in error.message
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "model.safetensors.index.json").unlink()
    shutil.copy(sound / "model.safetensors", folder)
    error = refusal(folder, tmp_path / "c")
    assert error is not None and 'model_type: "bert"' in error.message


def test_weights_that_do_not_fit_are_named(sound: Path, tmp_path: Path) -> None:
    tensors = load_file(sound / "model.safetensors")
    for i, change in enumerate(("model.norm.weight", "extra.weight", "lm_head.weight")):
        folder = tmp_path / f"folder{i}"
        shutil.copytree(sound, folder)
        changed = dict(tensors)
        if change in changed:
            del changed[change]
        else:
            changed[change] = tensors["model.embed_tokens.weight"] * 2
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        error = refusal(folder, tmp_path / f"{i}")
        assert error is not None and error.exit_code == 5 and change in error.message
