"""Small random models of `transformers`, imported, run and exported: equal logits, and the same bytes per tensor."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import family
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from specc.compiler.spec.check import load
from specc.runtime.families.family import families as known_families
from specc.runtime.hugging_face.exporting import ExportOptions, export_folder
from specc.runtime.hugging_face.importing import Imported, ImportOptions, import_folder
from specc.runtime.open_model import open_model

TOKENS, PROMPT = 60, 40  # longer than any window drawn


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e3}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}


def changed(name: str, **fields: Any) -> Callable[[int], Any]:
    """Draws a config of a family, with other fields."""

    def config(seed: int) -> Any:
        drawn = families.FAMILIES[name].config(random.Random(f"{name} {seed}")).to_dict()
        return transformers.AutoConfig.for_model(**drawn | fields)

    return config


ODD = {"hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": None, "intermediate_size": 33}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED, "num_hidden_layers": 4}
CASES: dict[str, tuple[Callable[[int], Any], int]] = {
    f"{name}-{seed}": (changed(name), seed) for name in known_families() for seed in range(3)
} | {
    "llama-odd": (changed("llama", **ODD, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}), 3),
    "mistral-odd": (changed("mistral", **ODD, sliding_window=5, rope_parameters=YARN, hidden_act="relu2"), 3),
    "qwen3-mixed": (changed("qwen3", **WINDOWS, attention_bias=True, rope_parameters={**YARN, "truncate": False}), 3),
    "gemma3_text-biased": (changed("gemma3_text", attention_bias=True, query_pre_attn_scalar=7), 3),
    "gpt_neox-linear": (changed("gpt_neox", rope_parameters={**LINEAR, "partial_rotary_factor": 0.5}), 3),
    "nanochat-yarn": (changed("nanochat", rope_parameters={**YARN, "attention_factor": 1.25}), 3),
    "mixtral-windowed": (changed("mixtral", sliding_window=6, head_dim=8, rope_parameters=YARN), 3),
    "qwen3_moe-sparse": (changed("qwen3_moe", decoder_sparse_step=2, use_sliding_window=True, sliding_window=7), 3),
    "deepseek_v2-uneven": (changed("deepseek_v2", kv_lora_rank=6, v_head_dim=10, rope_parameters=YARN), 3),
}


@dataclass(frozen=True)
class Pair:
    """A model of `transformers` in a folder, the run imported from it, and the opened run."""

    theirs: nn.Module
    folder: Path
    result: Imported
    ours: Any
    ids: Tensor


def options(folder: Path, **more: Any) -> ImportOptions:
    return ImportOptions(spec=folder / "spec.yaml", run=folder / "run", data="stdlib", **more)


@pytest.fixture(params=CASES, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    draw, seed = CASES[request.param]
    place, config = tmp_path_factory.mktemp(request.param), draw(seed)
    theirs = family.randomized(config, seed)
    theirs.save_pretrained(place / "there")
    result = import_folder(place / "there", options(place, name="model"), lambda line: None)
    ids = torch.randint(config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    return Pair(theirs, place, result, open_model(place / "run", "cpu").model, ids)


def test_logits_are_theirs_with_and_without_a_cache(pair: Pair) -> None:
    with torch.no_grad():
        expected = pair.theirs(pair.ids).logits
        nats = pair.ours.score(pair.ids[:, :-1], pair.ids[:, 1:])
        wanted = F.cross_entropy(expected[:, :-1].transpose(1, 2), pair.ids[:, 1:], reduction="none")
        torch.testing.assert_close(nats, wanted, rtol=0, atol=1e-4)
        cache = pair.ours.new_cache(2, family.CONTEXT)
        logits = pair.ours.prefill(pair.ids[:, :PROMPT], torch.tensor(0), cache)
        for t in range(PROMPT, TOKENS):
            torch.testing.assert_close(logits, expected[:, t - 1], rtol=0, atol=1e-4)
            logits = pair.ours.decode(pair.ids[:, t : t + 1], torch.tensor(t), cache)


def test_an_export_has_the_same_bytes_and_loads(pair: Pair, tmp_path: Path) -> None:
    there = pair.folder / "there"
    out = export_folder(pair.folder / "run", ExportOptions(tmp_path / "kept", shard=20_000), lambda line: None)
    for name in ("config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (there / name).read_bytes()
    require_same(load_file(there / "model.safetensors"), out)
    # the config of a run that was not imported is found from its spec
    (pair.folder / "run" / "files" / "config.json").rename(tmp_path / "config.json")
    written = export_folder(pair.folder / "run", ExportOptions(tmp_path / "found"), lambda line: None)
    (tmp_path / "config.json").rename(pair.folder / "run" / "files" / "config.json")
    for folder in (out, written):
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        with torch.no_grad():
            torch.testing.assert_close(loaded(pair.ids).logits, pair.theirs(pair.ids).logits, rtol=0, atol=1e-4)


def require_same(expected: dict[str, Tensor], folder: Path) -> None:
    written = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name


def test_the_spec_is_a_page_of_what_is_not_a_default(pair: Pair) -> None:
    text = pair.result.path.read_text()
    assert len(text.splitlines()) <= 70 and max(map(len, text.splitlines())) <= 110
    spec, source = load(text)
    assert source.data == tupled(yaml.safe_load(text))
    stated = spec.model.blocks.layers[0].model_fields_set - {"kind", "heads"}
    layer = spec.model.blocks.layers[0]
    assert [name for name in stated if getattr(layer, name) == type(layer).model_fields[name].default] == []


def tupled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: tupled(inner) for key, inner in value.items()}
    return tuple(map(tupled, value)) if isinstance(value, list) else value
