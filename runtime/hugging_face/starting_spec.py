"""The spec that an import writes: the model, fusion points, quantization and training settings."""

from collections.abc import Iterator, Sequence
from typing import Any

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.build import plan_loaded
from specc.compiler.errors import SpecError
from specc.compiler.programs.programs import LoweringError
from specc.compiler.spec.check import load
from specc.compiler.spec.spec import Spec
from specc.compiler.strict import Problem
from specc.runtime.families.config import ConfigError
from specc.runtime.families.tensors import Shapes
from specc.runtime.hugging_face.page import page

Data = dict[str, Any]
CONTEXT = 2048  # the maximum number of tokens of a training row, if the context of the model is longer
TARGETS = (("sm90", "cpu"), ("cpu",))


def checked_model(name: str, model: Data, tokenizer: str) -> Decoder:
    """Validates a section `model`, and returns the model. Raises ConfigError if the section is not valid."""
    spec = _checked(_unquantized(name, model, tokenizer))
    assert isinstance(spec.model, Decoder)
    return spec.model


def written_spec(name: str, model: Data, shapes: Shapes, tokenizer: str, comment: str) -> str:
    """Returns the text of the spec for an imported model.

    Args:
        name: the name of the spec.
        model: the section `model`.
        shapes: the shapes of the parameters.
        tokenizer: the tokenizer of the data.
        comment: the comment above the spec.

    Raises:
        ConfigError: if specc cannot build the model. The message states the first reason.
    """
    data = _unquantized(name, model, tokenizer)
    data = {**data, "quant": quantization(shapes), "train": data.pop("train")}
    return page(_buildable(data), comment)


def _unquantized(name: str, model: Data, tokenizer: str) -> Data:
    data: Data = {"spec_version": 2, "name": name, "targets": list(TARGETS[0]), "model": model}
    return data | {"fuse": list(fusion_points(model)), "train": training(model, tokenizer)}


def _checked(data: Data) -> Spec:
    try:
        return load(page(data))[0]
    except SpecError as error:
        first = error.diagnostics[0]
        raise ConfigError(f"config.json describes an invalid model: {first.message}", first.hint) from None


def _buildable(data: Data) -> Data:
    every: list[Data] = list(data["fuse"])
    lists = (every, *(every[:i] + every[i + 1 :] for i in range(len(every))), [])
    for targets in TARGETS:
        refused: set[int] = set()
        for points in lists:
            chosen = [point for point in points if every.index(point) not in refused]
            tried = data | {"targets": list(targets), "fuse": chosen}
            problems = _problems(tried)
            refused |= {every.index(chosen[i]) for i in _points_in(problems)}
            # The error names the invalid fusion points. The spec may build without these points.
            if problems and _points_in(problems):
                tried["fuse"] = [point for point in chosen if every.index(point) not in refused]
                problems = _problems(tried)
            if not problems:
                return {key: value for key, value in tried.items() if key != "fuse" or value}
    message = f"config.json describes a model that cannot be built: {problems[0].message}"
    raise ConfigError(message, problems[0].hint)


def _problems(data: Data) -> Sequence[Problem]:
    try:
        plan_loaded(_checked(data), None)
    except LoweringError as error:
        return error.problems
    return ()


def _points_in(problems: Sequence[Problem]) -> set[int]:
    return {int(problem.path[1]) for problem in problems if problem.path[:1] == ("fuse",) and len(problem.path) > 1}


def fusion_points(model: Data) -> Iterator[Data]:
    """Yields the fusion points that a decoder can have, given its section `model`."""
    layers = {layer.get("name") or layer["kind"]: layer for layer in model["blocks"]["layers"]}
    attention = next((name for name in ("attention", "latent") if name in layers), None)
    if attention is not None:
        yield {f"blocks.*.{attention}": ["y"]}
    if "attention" in layers and "rope" in layers["attention"]:
        norm = layers["attention"].get("qk_norm", {"over": "all"})
        inner = [] if norm.get("over") == "all" else ["norm"]
        for part in ("q", "k"):
            steps = ["rope", *inner] if norm.get("after_rope") else [*inner, "rope"]
            yield {"blocks.*.attention": [f"{part}.{step}" for step in steps]}
    if layers.get("mlp", {}).get("kind") == "mlp":
        yield {"blocks.*.mlp": ["up", "act", "down"]}
    yield {"head": ["logits", *(["softcap"] if "softcap" in model["head"] else []), "loss"]}


def quantization(shapes: Shapes) -> Data:
    """Returns the section `quant` of a spec.

    Matrices have 4 bits per value. Embedding tables, routers, norms and biases have more bits per value.
    """
    tables = [name for name in ("embed.token", "embed.positions") if name in shapes]
    rules: list[Data] = [{"match": name, "scheme": "round", "bits": 8} for name in tables]
    if any(name.endswith(".router") for name in shapes):
        rules.append({"match": "*.router", "scheme": "none", "dtype": "f32"})
    for ending in ("weight", "bias"):
        if any(name.endswith(f"_{ending}") for name in shapes):
            rules.append({"match": f"*_{ending}", "scheme": "none", "dtype": "f16"})
    return {"default": {"scheme": "gptq", "bits": 4}, "rules": rules}


def training(model: Data, tokenizer: str) -> Data:
    """Returns the section `train` of a spec, with settings that continue the training of a published model."""
    shorter = model["context"] > CONTEXT and model["context"] % CONTEXT == 0
    tokens = model["context"] * max(1, 32768 // model["context"])
    return {
        "data": {"tokenizer": tokenizer},
        **({"context": CONTEXT} if shorter else {}),
        "micro_batch": 1,
        "tokens_per_step": tokens,
        "steps": 1000,
        "optimizers": [{"kind": "adamw", "match": "*", "lr": 2e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}],
        "schedule": {"warmup_fraction": 0.05, "warmdown_fraction": 0.9, "floor": 0.1},
        "clip_norm": 1.0,
    }
