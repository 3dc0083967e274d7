"""Name patterns of rules and fusion points: `*` stands for any characters, dots included; `{a,b.*}` for one of
several, which may have a `*` too."""

import re
from functools import cache


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    spelled = []
    for part in re.split(r"(\{[^{}]*\})", pattern):
        if re.fullmatch(r"\{[^{}]*\}", part):
            spelled.append("(?:" + "|".join(_starred(choice.strip()) for choice in part[1:-1].split(",")) + ")")
        else:
            spelled.append(_starred(part))
    return re.compile("".join(spelled))


def _starred(text: str) -> str:
    """The regular expression of a text without choices."""
    return ".*".join(map(re.escape, text.split("*")))


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` covers the whole of `name`, e.g. `blocks.*.{up,down}` covers `blocks.3.mlp.up`."""
    return _compiled(pattern).fullmatch(name) is not None
