"""Rotary positions: converts between the field `rope` of a spec and the fields of a config.

A config has the field `rope_parameters`. Older configs have the fields `rope_theta` and `rope_scaling` instead.
"""

from collections.abc import Mapping
from typing import Any

from specc.compiler.blocks.rope import Llama3, RopeSpec, Yarn
from specc.runtime.families.config import Config

Data = dict[str, Any]
LAYERS = ("sliding_attention", "full_attention")  # the kinds of layers, each of which may have a separate base
KINDS = {kind: kind for kind in ("default", "linear", "llama3", "yarn")}
NEEDED = "specc has the rope_type default, linear, llama3 and yarn"


def rope(config: Config, base: float = 10000.0, key: str = "", old: str = "rope_theta", **more: Any) -> Data:
    """Returns the section `rope` of an attention layer, as data of a spec.

    Args:
        config: the config.
        base: the default base of the frequencies in the family.
        key: the entry of `rope_parameters` for the kind of the layer. Empty if the family has only one kind.
        old: the name of the field that contains the base in older configs.
        more: other fields of the section.
    """
    parameters, scaling = config.inner("rope_parameters"), config.inner("rope_scaling")
    if parameters is not None and scaling is not None and parameters.fields != scaling.fields:
        raise config.error("rope_scaling", "it differs from rope_parameters", "state one of the two")
    if key and parameters is not None:
        for name in sorted(parameters.fields.keys() - set(LAYERS)):
            raise parameters.error(name, f"the field is not one of {', '.join(LAYERS)}", NEEDED)
        parameters = parameters.inner(key)
    if scaling is not None and key != LAYERS[0]:
        parameters = parameters or scaling
    base = config.number(old, base)
    config.number("rope_theta", base)
    if parameters is None:
        return {"base": base, **more}
    turned: Data = {"base": parameters.number("rope_theta", base), **more}
    parameters.value("type"), parameters.value("finetuned")
    kind = parameters.choice("rope_type", parameters.fields.get("type") or "default", KINDS, NEEDED)
    if "dims" in more:
        parameters.value("partial_rotary_factor")  # GPT-NeoX computes `dims` from this fraction
    else:
        parameters.fixed("partial_rotary_factor", (1, 1.0, None), "only GPT-NeoX rotates a part of each head")
    if kind == "default":
        for name in parameters.unread():  # fields of other values of rope_type, which have no effect
            parameters.value(name)
        return turned
    factor = parameters.number("factor", least=0.999)
    if kind == "linear":
        turned["scaling"] = f"f / {factor:g}"
        parameters.value("original_max_position_embeddings")
    else:
        trained = parameters.whole("original_max_position_embeddings", config.fields.get("max_position_embeddings"))
        turned["scaling"] = {"kind": kind, "factor": factor, **_blend(parameters, kind), "trained": trained}
        if kind == "yarn" and (magnitude := _magnitude(parameters)) is not None:
            turned["scaling"]["magnitude"] = magnitude
    parameters.finish(NEEDED)
    return turned


def _blend(parameters: Config, kind: str) -> Data:
    low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    usual = {"low": 1.0, "high": 4.0 if kind == "llama3" else 32.0}
    stated = {"low": parameters.number(low, usual["low"]), "high": parameters.number(high, usual["high"])}
    blend: Data = {name: value for name, value in stated.items() if value != usual[name]}
    if kind == "yarn" and not parameters.flag("truncate", True):
        blend["whole"] = False
    return blend


def _magnitude(parameters: Config) -> float | str | None:
    if parameters.stated("attention_factor"):
        parameters.value("mscale"), parameters.value("mscale_all_dim")
        return parameters.number("attention_factor")
    scales = [parameters.number(name, 0.0, -1.0) for name in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    if scales[0] == scales[1]:
        return 1.0
    above, below = (f"(0.1 * {scale:g} * log(factor) + 1)" for scale in scales)
    return f"{above} / {below}"


def rope_parameters(spec: RopeSpec | None, more: Mapping[str, Any] | None = None) -> Data:
    """Returns the field `rope_parameters` for the rotary positions of a spec."""
    spec = spec or RopeSpec()
    parameters: Data = {"rope_type": "default", "rope_theta": spec.base, **(more or {})}
    scaling = spec.scaling
    if isinstance(scaling, str):
        divisor = scaling.replace(" ", "").removeprefix("f/")
        number = divisor.replace(".", "", 1).isdigit()
        return parameters | ({"rope_type": "linear", "factor": float(divisor)} if number else {})
    if isinstance(scaling, Llama3):
        parameters |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    elif isinstance(scaling, Yarn):
        parameters |= {"beta_slow": scaling.low, "beta_fast": scaling.high, "truncate": scaling.whole}
        parameters["attention_factor"] = scaling.multiplier
    if scaling is not None:
        parameters |= {"rope_type": scaling.kind, "factor": scaling.factor}
        parameters["original_max_position_embeddings"] = scaling.trained
    return parameters
