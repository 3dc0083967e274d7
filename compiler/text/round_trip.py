"""YAML texts as data that keep comments and layout."""

import io
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.tokens import CommentToken


def _yaml() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.brace_single_entry_mapping_in_flow_sequence = True  # [{kind: token}] stays as it is written
    return yaml


def editable(text: str) -> Any:
    return _yaml().load(text)


def edited(data: Any) -> str:
    stream = io.StringIO()
    _yaml().dump(data, stream)
    return stream.getvalue().rstrip() + "\n"


def flow(value: Any) -> Any:
    """Converts a dict or list so that `edited` writes the result on one line. Data that come from `editable` keep their
    layout, and are returned unchanged."""
    flowing: CommentedMap | CommentedSeq
    if isinstance(value, dict) and not isinstance(value, CommentedMap):
        flowing = CommentedMap((key, flow(inner)) for key, inner in value.items())
    elif isinstance(value, list) and not isinstance(value, CommentedSeq):
        flowing = CommentedSeq(flow(inner) for inner in value)
    else:
        return value
    flowing.fa.set_flow_style()
    return flowing


def without_comment(part: Any, key: str | int) -> None:
    """Removes the comment after the value of `key` in `part`, but not the empty lines that follow the comment. `part`
    is a mapping or list in data from `editable`."""
    for token in part.ca.items.get(key, ()):
        if isinstance(token, CommentToken) and token.value.lstrip(" ").startswith("#"):
            token.value = "\n" + token.value.partition("\n")[2]
