"""Reads the fields of a config.json with types, ranges and defaults, and records which fields were read."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from specc.runtime.errors import RuntimeFailure

T = TypeVar("T")
CONFIG = "config.json"
MOST = 2**31 - 1

# Fields that do not change the function of a model, such as settings of training and generation.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path _num_labels _sliding_window_pattern
    architectures attention_dropout attn_implementation attn_pdrop auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size
    eos_token_id ep_size exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing hidden_dropout id2label initializer_range is_decoder is_encoder_decoder is_llama_config
    label2id length_penalty max_length min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams
    num_labels num_return_sequences output_attentions output_hidden_states output_router_logits output_scores
    pad_token_id prefix pretraining_tp problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate router_aux_loss_coef router_jitter_noise sep_token_id seq_aux summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
    temperature tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)


class ConfigError(RuntimeFailure):
    """Raised if a config.json is not valid, or contains a feature that specc lacks (exit code 2)."""

    code = "U013"
    exit_code = 2


def require_folder(path: Path) -> None:
    """Raises ConfigError if `path` is not a folder with a config.json."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder", "name a folder with config.json and model.safetensors")
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path}: has no config.json", "name a folder that save_pretrained wrote")


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Config:
    """The fields of a config.json, or of one section of a config.json.

    Args:
        fields: the values of the fields, by name.
        place: the path of the file, for messages.
        section: the path of the section in the file, such as `rope_parameters`; empty for the whole file.

    Attributes:
        read: the names of the fields that the program has read.
    """

    def __init__(self, fields: Mapping[str, Any], place: str = "config.json", section: str = "") -> None:
        self.fields, self.place, self.section = fields, place, section
        self.read: set[str] = set()

    def error(self, key: str, message: str, hint: str) -> ConfigError:
        path = f"{self.section}.{key}" if self.section else key
        subject = f"{path} is {shown(self.fields[key])};" if key in self.fields else f"{path}:"
        return ConfigError(f"{self.place}: {subject} {message}", hint)

    def value(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.fields.get(key, default)

    def _value_or(self, key: str, default: Any) -> Any:
        value = self.value(key)
        return default if value is None else value

    def absent(self, key: str, default: T | None) -> T | None:
        """Returns `default` if the config has no field `key`. Otherwise, returns None. A field with the value null is
        present.

        Pass the result as the default of a method such as `whole`. That method then uses `default` only if the field is
        missing, and does not accept the value null.
        """
        self.read.add(key)
        return None if key in self.fields else default

    def stated(self, key: str) -> bool:
        return self.value(key) is not None

    def whole(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Returns the value of an integer field.

        Args:
            key: the name of the field.
            default: the value of a field that is absent or null; None if the field is required.
            least: the smallest allowed value.
            most: the largest allowed value.

        Raises:
            ConfigError: the field is missing, or is not an integer from `least` to `most`.
        """
        value = self._value_or(key, default)
        if value is None:
            raise self.error(key, "the field is missing", f"state a whole number, at least {least}")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(key, "it is not a whole number in range", f"use a whole number from {least:,} to {most:,}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        """Returns the value of a numeric field, which must be finite and greater than `least`.

        `default` replaces a field that is absent or null.
        """
        value = self._value_or(key, default)
        if value is None:
            raise self.error(key, "the field is missing", f"state a number above {least:g}")
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not least < value < 1e18 or not math.isfinite(value):
            raise self.error(key, "it is not a number in range", f"use a number above {least:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns the value of a boolean field. `default` replaces a field that is absent or null."""
        value = self._value_or(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "it is neither true nor false", "use true or false")
        return value

    def choice(self, key: str, default: str, choices: Mapping[str, T], needed: str) -> T:
        """Returns the entry of `choices` whose name is the value of a field.

        Args:
            key: the name of the field.
            default: the value of a field that is absent or null.
            choices: the entries by name.
            needed: the hint of the error for a value that is not in `choices`.

        Raises:
            ConfigError: the value of the field is not in `choices`.
        """
        value = self._value_or(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"it is not one of {', '.join(choices)}", needed)
        return choices[value]

    def fixed(self, key: str, values: Sequence[Any], needed: str) -> None:
        """Raises ConfigError if the field `key` is present and its value is not in `values`.

        `needed` is the hint of the error.
        """
        value = self.value(key)
        if key in self.fields and not any(type(value) is type(known) and value == known for known in values):
            raise self.error(key, "this value is not supported", needed)

    def inner(self, key: str) -> "Config | None":
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "it is not a section", "use an object of fields")
        return Config(value, self.place, f"{self.section}.{key}" if self.section else key)

    def unread(self) -> list[str]:
        return sorted(key for key in self.fields if key not in self.read)

    def finish(self, needed: str) -> None:
        """Raises ConfigError if the program has not read a field whose value is not null.

        `needed` is the hint of the error.
        """
        for key in self.unread():
            if self.fields[key] is not None:
                raise self.error(key, "the field is not known here", needed)


def require_known(config: Config, family: str, ignored: Sequence[str] = ()) -> list[str]:
    """Returns the names of the fields that a family did not read, because they do not change the function of the model.

    Args:
        config: the config, after the family has read its fields.
        family: the name of the family, for messages.
        ignored: the names of unknown fields that the user allows.

    Raises:
        ConfigError: if an unknown field has a value other than null, false or an empty value, and is not in `ignored`.
    """
    for key in config.unread():
        value = config.fields[key]
        idle = value is None or value is False or value in ([], {}, "")
        if key not in HARMLESS and key not in ignored and not idle:
            hint = f"if the field does not change what the model computes, ignore it: --ignore {key}"
            raise config.error(key, f"the family {family} of specc does not know this field", hint)
    return config.unread()
