"""Qwen3: Llama with norms of q and k. In some models, the last layers have sliding-window attention."""

from specc.compiler.architectures.decoder import Decoder
from specc.compiler.blocks.attention import Attention
from specc.runtime.families.conditions import where
from specc.runtime.families.config import Config
from specc.runtime.families.family import Data, Family
from specc.runtime.families.fields import eps_of, feed_forward, heads, layer_of, sizes, window_of
from specc.runtime.families.positions import rope
from specc.runtime.families.sections import attention, bias, decoder, mlp, norm, qk_norm, window
from specc.runtime.families.tables import LLAMA, QK_NORMS

KINDS = ("full_attention", "sliding_attention")
WINDOW = 4096  # the default number of tokens with use_sliding_window


def model(config: Config) -> Data:
    eps, count = config.number("rms_norm_eps", 1e-6), config.whole("num_hidden_layers", most=1000)
    windowed = _windowed(config, count)
    masked = window(config, WINDOW)
    everywhere = masked if len(windowed) == count else {}
    normed = {"qk_norm": qk_norm(eps, weight="w"), **everywhere, **bias(config, "attention_bias")}
    layers = [attention(config, rope(config), 128, 32, **normed), mlp(config)]
    changes = [{"where": where(windowed, count), "attention": masked}] if windowed and not everywhere else []
    more = {"changes": changes} if changes else {}
    return decoder(config, norm("rms", eps, weight="w"), layers, False, **more)


def _windowed(config: Config, count: int) -> list[int]:
    sliding, first = config.flag("use_sliding_window", False), config.whole("max_window_layers", 28, least=0)
    has_window = sliding and bool(window(config, WINDOW))
    kinds = layer_types(config, count, KINDS) or [KINDS[has_window and i >= first] for i in range(count)]
    windowed = [i for i, kind in enumerate(kinds) if kind == KINDS[1]]
    if windowed and not has_window:
        raise config.error(
            "layer_types", "it names windows, but no window is set", "set use_sliding_window and sliding_window"
        )
    return windowed


def layer_types(config: Config, count: int, kinds: tuple[str, ...]) -> list[str] | None:
    """Returns the kind of each layer; None if the config does not list the kinds.

    Args:
        config: the config.
        count: the number of layers of the model.
        kinds: the kinds of layers that the family supports.

    Raises:
        ConfigError: if the list in the config does not have `count` entries, or has a kind that is not in `kinds`.
    """
    listed = config.value("layer_types")
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) != count or any(kind not in kinds for kind in listed):
        message = f"it does not list {' or '.join(kinds)} for each of the {count} layers"
        raise config.error("layer_types", message, "specc has no block for other kinds of layers")
    return listed


def config(model: Decoder) -> Data:
    fields = sizes(model) | heads(model) | feed_forward(model) | {"rms_norm_eps": eps_of(model.norm)}
    layers = [layer_of(model, Attention, i) for i in range(model.blocks.count)]
    windows = [window_of(layer.mask) for layer in layers]
    fields |= {"attention_bias": bool(layers[0].bias), "use_sliding_window": any(windows)}
    fields["sliding_window"] = next(filter(None, windows), None)
    return fields | {"layer_types": [KINDS[size is not None] for size in windows]}


FAMILY = Family("qwen3", "Qwen3", "Qwen3ForCausalLM", model, config, lambda config: (*LLAMA, *QK_NORMS))
