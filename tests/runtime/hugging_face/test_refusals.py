"""Folders that specc does not import: each is refused by name, with exit code 2 or 5."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import families_of_llama
import family
import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.spec.start import StartSpec
from specc.runtime.errors import RuntimeFailure
from specc.runtime.families.config import Config, ConfigError, require_known
from specc.runtime.families.family import families
from specc.runtime.hugging_face.importing import ImportOptions, import_folder
from specc.runtime.open_model import realize
from specc.runtime.storage import checkpoint
from specc.runtime.weights.source import StartError
from specc.runtime.weights.start import start_from

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 64, "num_key_value_heads": 4}
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
    ("gemma3_text", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("llama", {"logits_multiplier": 0}, "logits_multiplier"),
    ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8}, "num_attention_heads"),
    ("qwen3_moe", {"mlp_only_layers": [7], "num_experts_per_tok": 2}, "mlp_only_layers"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "num_experts_per_tok": 2}, "topk_method"),
    ("deepseek_v2", {"scoring_func": "sigmoid", "num_experts_per_tok": 2}, "scoring_func"),
]


def test_a_scale_of_attention_may_read_the_number_of_blocks() -> None:
    """An export states the scale as a factor of YaRN, computed with the blocks of the model."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    rope = {"rope_parameters": {**yarn, "mscale": 0.5, "mscale_all_dim": 0.5}}
    family = families()["deepseek_v2"]
    text = json.dumps(family.model(Config({**SIZES, **rope, "num_experts_per_tok": 2})))
    model, scaled = (
        Decoder.model_validate_json(each) for each in (text, text.replace(") ** 2 /", ") ** 2 * (layers / 4) /"))
    )
    assert model != scaled and family.config(model) == family.config(scaled)


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
    with pytest.raises(ConfigError, match="secret is 3"):
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
    assert error is not None and 'model_type is "bert"' in error.message


def test_a_weight_that_is_not_finite_is_named(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "folder")
    tensors = load_file(sound / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.inf
    save_file(tensors, tmp_path / "folder" / "model.safetensors", {"format": "pt"})
    error = refusal(tmp_path / "folder", tmp_path / "a")
    assert error is not None and error.exit_code == 5 and "model.norm.weight has NaN or infinity" in error.message


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
