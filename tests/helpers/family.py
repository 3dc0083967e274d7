"""A family of decoders as `transformers` has it: a random config, the spec that says it, and a table of names.

A table has one row per parameter of ours: the parameter of theirs, and a linear map where the tensors differ. Gradients
take the same map.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from specc.runtime.families.config import Config
from specc.runtime.families.family import families
from specc.runtime.families.tensors import Shapes, expanded

CONTEXT = 64
Row = str | tuple[str, Callable[[Tensor, Any], Tensor]]
Table = Mapping[str, Row]
ATTENTION = ({"blocks.*.attention": ["y"]},)
ROPE = ({"blocks.*.attention": ["q.rope"]}, {"blocks.*.attention": ["k.rope"]})
NORM_ROPE = ({"blocks.*.attention": ["q.norm", "q.rope"]}, {"blocks.*.attention": ["k.norm", "k.rope"]})
MLP = ({"blocks.*.mlp": ["up", "act", "down"]},)
HEAD = ({"head": ["logits", "loss"]},)
CAPPED = ({"head": ["logits", "softcap", "loss"]},)


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        config: draws a config.
        model: the `model` section of the spec of a config.
        table: parameters of ours, with `{i}` for the block, to parameters of theirs.
        embedded: parameters of ours that stand outside the blocks; `head.logits` only where the head is not tied.
        fuse: the fusion points that the family has.
        others: rows that replace those of `table` whose tensor the layer of theirs does not have.
    """

    config: Callable[[random.Random], Any]
    model: Callable[[Any], dict[str, Any]]
    table: Table
    outside: Table
    fuse: tuple[Mapping[str, list[str]], ...]
    others: Table = field(default_factory=dict)

    def spec(self, config: Any) -> dict[str, Any]:
        """The spec of a config, as the data of its YAML file."""
        sizes = {"kind": "decoder", "vocab": config.vocab_size, "context": CONTEXT}
        return spec_of_model(config, {**sizes, **self.model(config)}, self.fuse)

    def parameters(self, theirs: nn.Module, tensors: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
        """Parameters of ours, of tensors by the names of parameters of theirs."""
        return {name: self.ours(name, tensors, theirs.config).reshape(shape) for name, shape in shapes.items()}

    def ours(self, name: str, theirs: Mapping[str, Tensor], config: Any) -> Tensor:
        """A parameter of ours, of their tensors."""
        if name in self.outside:
            row, layer = self.outside[name], ""
        else:
            _, layer, rest = name.split(".", 2)
            row = self.table[rest]
            if rest in self.others and _source(row, layer) not in theirs:
                row = self.others[rest]
        tensor = theirs[_source(row, layer)]
        return tensor if isinstance(row, str) else row[1](tensor, config)


@dataclass(frozen=True)
class KnownFamily:
    """A family that specc imports: the spec of a config, and the names of tensors, are those of runtime/families.

    Attributes:
        name: the name of the family.
        config: draws a config.
        fuse: the fusion points that the family has.
    """

    name: str
    config: Callable[[random.Random], Any]
    fuse: tuple[Mapping[str, list[str]], ...]

    def model(self, config: Any) -> dict[str, Any]:
        """The `model` section of the spec of a config."""
        return families()[self.name].model(Config(config.to_dict()))

    def spec(self, config: Any) -> dict[str, Any]:
        """The spec of a config, as the data of its YAML file."""
        return spec_of_model(config, self.model(config), self.fuse)

    def parameters(self, theirs: nn.Module, tensors: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
        """Parameters of ours, of tensors by the names of parameters of theirs, which may differ from those in files."""
        table = families()[self.name].table(Config(theirs.config.to_dict()))
        stored = revert_weight_conversion(theirs, dict(tensors))
        parameters: dict[str, Tensor] = {}
        for row in expanded(table, shapes, theirs.config.num_hidden_layers):
            parameters |= zip(row.parameters, row.split([stored[name] for name in row.tensors]), strict=True)
        return parameters


def spec_of_model(config: Any, model: dict[str, Any], fuse: Sequence[Mapping[str, list[str]]]) -> dict[str, Any]:
    """The spec of a `model` section, as the data of its YAML file."""
    return {
        "spec_version": 2,
        "name": config.model_type.replace("-", "_"),
        "targets": ["cpu"],
        "model": model,
        "fuse": list(fuse),
        "train": {
            "micro_batch": 2,
            "tokens_per_step": 2 * CONTEXT,
            "data": {"tokenizer": "any.model"},
            "steps": 2,
            "optimizers": [{"kind": "adamw", "match": "*", "lr": 0.01}],
        },
    }


def _source(row: Row, layer: str) -> str:
    """The parameter of theirs in a row, with the block filled in."""
    return (row if isinstance(row, str) else row[0]).format(i=layer)


def randomized(config: Any, seed: int) -> nn.Module:
    """A model of `transformers` in which no parameter is at its initial value: weights of ones and biases of zeros hide
    errors."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(std=value.shape[-1] ** -0.5)
            else:
                start = value.clone() if "norm" in name or "ln_" in name else 0
                value.normal_(std=0.3).add_(start)
    return model.eval()


def common(rng: random.Random, **more: Any) -> dict[str, Any]:
    """Sizes that every family has."""
    heads = rng.choice((2, 4, 6))
    return {
        "vocab_size": rng.randint(30, 60),
        "hidden_size": heads * 8 * rng.randint(1, 2),
        "num_hidden_layers": rng.randint(2, 4),
        "num_attention_heads": heads,
        "intermediate_size": 4 * rng.randint(5, 15),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        **more,
    }


def grouped(rng: random.Random, **more: Any) -> dict[str, Any]:
    """Sizes with fewer key heads, and heads of a size of their own."""
    sizes = common(rng, **more)
    sizes["num_key_value_heads"] = sizes["num_attention_heads"] // rng.choice((1, 2))
    return sizes


def attention(config: Any, **more: Any) -> dict[str, Any]:
    """Attention with grouped queries and heads of a size of their own."""
    return {
        "kind": "attention",
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        **more,
    }


def mlp(config: Any, act: str = "silu(gate) * x", **more: Any) -> dict[str, Any]:
    return {"kind": "mlp", "hidden": config.intermediate_size, "act": act, **more}


def shape(config: Any, norm: dict[str, Any], layers: list[dict[str, Any]], **blocks: Any) -> dict[str, Any]:
    """A `model` section whose last norm is that before its layers."""
    last = {key: value for key, value in norm.items() if key != "places"}
    return {
        "dim": config.hidden_size,
        "embed": [{"kind": "token"}],
        "blocks": {"count": config.num_hidden_layers, "norm": norm, "layers": layers, **blocks},
        "norm": last,
        "head": {"tied": config.tie_word_embeddings},
    }


def rope(parameters: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The rotary positions of a config."""
    turned = {"base": parameters["rope_theta"], **more}
    if parameters["rope_type"] == "llama3":
        turned["scaling"] = {
            "kind": "llama3",
            "factor": parameters["factor"],
            "low": parameters["low_freq_factor"],
            "high": parameters["high_freq_factor"],
            "trained": parameters["original_max_position_embeddings"],
        }
    return turned


def bias_of(name: str, config: Any) -> dict[str, bool]:
    """`bias: true` where the config says so."""
    return {"bias": True} if getattr(config, name) else {}


def transposed(tensor: Tensor, config: Any) -> Tensor:
    return tensor.T.contiguous()


def biased(table: Table) -> Table:
    """The table with a bias of every matrix that is a `weight`."""
    biases: dict[str, Row] = {}
    for name, row in table.items():
        theirs, map = (row, None) if isinstance(row, str) else row
        bias = theirs.removesuffix("weight") + "bias"
        biases[f"{name}_bias"] = bias if map in (None, transposed) else (bias, map)
    return {**table, **biases}
