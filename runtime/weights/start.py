"""Copies weights into the parameters of a model, as `train.start` of a spec states."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from specc.compiler.pattern import matches
from specc.compiler.spec.spec import Spec
from specc.compiler.spec.start import StartSpec
from specc.runtime.open_model import Say
from specc.runtime.storage.start_record import StartRecord
from specc.runtime.weights.open import open_weights
from specc.runtime.weights.source import StartError

SHOWN = 6  # the maximum number of names in a message


def start_from(start: StartSpec, model: nn.Module, spec: Spec, say: Say) -> StartRecord:
    """Copies weights into the parameters of a model.

    Args:
        start: the path of the weights, and the patterns of the parameter names to load.
        model: the model. Its parameters are f32, with initial values.
        spec: the spec of the model.
        say: the function that receives messages about loaded parameters, about damaged checkpoints, and about weights
            that were trained with another tokenizer.

    Returns:
        A record of the loaded weights.

    Raises:
        StartError: if the weights do not match the model, a pattern selects nothing, or a value is not finite. The
            model does not change.
        RunFailure: if the source is a run without a checkpoint.
        ConfigError: if specc does not support the model in a config.json.
        IntegrityError: if a file is damaged.
    """
    path = Path(start.path)
    source = open_weights(path, say)
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    _require_fit(start, path, shapes, source.shapes)
    digests, taken = dict[str, str](), dict[str, Tensor]()
    for name in filter(start.takes, parameters):
        tensor = source.read(name).contiguous()
        if not bool(torch.isfinite(tensor).all()):
            raise StartError(
                f"train.start: {path}: {name} has NaN or infinity", "start from weights without NaN and infinity"
            )
        digests[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        taken[name] = tensor
    with torch.no_grad():
        for name, tensor in taken.items():
            parameters[name].copy_(tensor)
    step = f" after step {source.step}" if source.step is not None else ""
    left = [name for name in parameters if name not in taken]
    others = f"; initial values: {_listed(left)}" if left else ""
    say(f"starting from {path}{step}: {len(taken)} of {len(parameters)} parameters{others}")
    before, now = (getattr(each.train.data, "tokenizer", None) for each in (source.spec or spec, spec))
    if before != now:
        say(f"{path} was trained with the tokenizer {before}, and this run uses {now}: equal ids may mean other text")
    return StartRecord(path=str(path), kind=source.kind, step=source.step, tensors=digests)


def _require_fit(
    start: StartSpec, path: Path, model: Mapping[str, tuple[int, ...]], source: Mapping[str, tuple[int, ...]]
) -> None:
    names = dict.fromkeys([*model, *source])
    idle = [p for p in (*start.take, *start.skip) if not any(matches(p, name) for name in names)]
    if idle:
        message = f"train.start: no parameter of the model and no tensor of {path} matches {_listed(idle)}"
        raise StartError(message, f"names are like {', '.join([*model][:: max(len(model) - 1, 1)])}")
    selected = [name for name in names if start.takes(name)]
    shapes = [
        f"{name} is {list(source[name])} in the source and {list(model[name])} in the model"
        for name in selected
        if name in model and name in source and model[name] != source[name]
    ]
    misfits = [
        (f"the model lacks {_listed(extra)}" if (extra := [name for name in selected if name not in model]) else ""),
        (f"{path} lacks {_listed(missing)}" if (missing := [name for name in selected if name not in source]) else ""),
        _listed(shapes),
    ]
    if any(misfits):
        first = next(iter([*extra, *missing, *(text.partition(" ")[0] for text in shapes)]))
        hint = f"leave names out, such as `train.start={{path: {path}, skip: [{first}]}}`, or select some with `take`"
        raise StartError(f"train.start: {'; '.join(filter(None, misfits))}", hint)


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
