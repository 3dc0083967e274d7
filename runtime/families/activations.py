"""Activations, and the names that config.json files use for them."""

from collections.abc import Mapping

from specc.compiler.expr import ExprError, parse
from specc.runtime.families.config import Config

OPERANDS = ("x", "gate")
# If an expression has several names, an export writes the first name.
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu({})",
    "swish": "silu({})",
    "gelu": "gelu({})",
    "gelu_python": "gelu({})",
    "gelu_pytorch_tanh": "gelu_tanh({})",
    "gelu_new": "gelu_tanh({})",
    "gelu_fast": "gelu_tanh({})",
    "relu": "relu({})",
    "relu2": "relu({}) ** 2",
    "quick_gelu": "{0} * sigmoid(1.702 * {0})",
    "sigmoid": "sigmoid({})",
    "tanh": "tanh({})",
}
NEEDED = "an activation needs its formula in runtime/families/activations.py"


def activation(config: Config, key: str, default: str, gated: bool) -> str:
    """Returns the expression of the activation that a field of the config names.

    Args:
        config: the config.
        key: the name of the field.
        default: the name of the activation if the field is missing.
        gated: whether the layer has a gate.

    Returns:
        The expression act(x), or act(gate) * x if `gated`.

    Raises:
        ConfigError: the activation is unknown.
    """
    return _text(config.choice(key, default, ACTIVATIONS, NEEDED), gated)


def name_of(expression: str, gated: bool) -> str | None:
    """Returns the name of an activation in config.json files. None if these files have no name for the activation.

    `gated` states whether `expression` includes the product with the gate.
    """
    try:
        parsed = parse(expression, OPERANDS)
    except ExprError:
        return None
    return next((name for name, text in ACTIVATIONS.items() if parse(_text(text, gated), OPERANDS) == parsed), None)


def _text(template: str, gated: bool) -> str:
    text = template.format("gate" if gated else "x")
    return f"{text} * x" if gated else text
