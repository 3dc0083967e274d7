"""The page of families: its model sections have the parameters of Transformers' default models."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES

from specc.compiler import pipeline
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec

PAGE = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```yaml\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
TYPES = {
    "Llama": "llama",
    "Qwen3": "qwen3",
    "Mixtral": "mixtral",
    "Qwen3-MoE": "qwen3_moe",
    "DeepSeek-V2": "deepseek_v2",
    "OLMo 2": "olmo2",
    "Gemma 3": "gemma3_text",
    "GPT-NeoX": "gpt_neox",
    "GPT-2": "gpt2",
    "nanochat": "nanochat",
    "GPT": "openai-gpt",
    "OLMo": "olmo",
    "BLOOM": "bloom",
    "Cohere": "cohere",
}
# q, k, v in one matrix; norms of heads as a matrix; gate and up of experts in one tensor
OTHER_SHAPES = ("GPT", "GPT-2", "GPT-NeoX", "BLOOM", "Cohere", "Mixtral", "Qwen3-MoE", "DeepSeek-V2")
SHOWN = {  # settings of the page that are not the defaults
    "OLMo": {"clip_qkv": 8.0},
    "BLOOM": {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    "Cohere": {"use_qk_norm": True},
    "DeepSeek-V2": {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
    },
}
REST = """spec_version: 2
name: family
targets: [cpu]
fuse: []
train:
  data: {tokenizer: any.model}
  tokens_per_step: 131072
  micro_batch: 1
  steps: 1
  optimizers: [{kind: adamw, match: "*", lr: 0.1}]
"""


def spec_of_section(text: str) -> Spec:
    return load(REST + text)[0]


def test_every_family_of_the_oracle_is_on_the_page() -> None:
    assert SECTIONS.keys() == TYPES.keys()
    assert set(TYPES.values()) | {"mistral"} == FAMILIES.keys()  # Mistral is Llama with a window


@pytest.mark.parametrize("title", TYPES)
def test_a_section_has_the_parameters_of_transformers(title: str) -> None:
    config = transformers.AutoConfig.for_model(TYPES[title], **SHOWN.get(title, {}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sorted(tuple(sorted(p.shape)) for p in model.parameters())
    params = pipeline.lower(spec_of_section(SECTIONS[title]), "cpu").params
    assert sum(param.count for param in params) == sum(p.numel() for p in model.parameters())
    if title not in OTHER_SHAPES:
        assert sorted(tuple(sorted(param.shape)) for param in params) == expected


@pytest.mark.parametrize("title", TYPES)
def test_a_section_says_what_the_oracle_checks(title: str) -> None:
    """The oracle's section of the same config is the page's, but for the initial values and the context."""
    name = TYPES[title]
    config = transformers.AutoConfig.for_model(name, **SHOWN.get(title, {}))
    if not hasattr(config, "head_dim") or config.head_dim is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    shown = spec_of_section(SECTIONS[title]).model
    oracle = {"kind": "decoder", "vocab": config.vocab_size, "context": shown.window, **FAMILIES[name].model(config)}
    checked = spec_of_section("model: " + json.dumps(oracle))
    graphs = [pipeline.lower(spec, "cpu") for spec in (spec_of_section(SECTIONS[title]), checked)]
    names = [[(param.name, param.shape) for param in programs.params] for programs in graphs]
    assert names[0] == names[1]
    for program in ("train", "decode"):
        first, second = ([(node.name, node.op) for node in graph.program(program).nodes] for graph in graphs)
        assert first == second
    assert [[(n.name, n.op) for n in f.nodes] for f in graphs[0].functions] == [
        [(n.name, n.op) for n in f.nodes] for f in graphs[1].functions
    ]
