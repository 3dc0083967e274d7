"""Name patterns of rules and fusion points: `*` stands for any characters, dots included; `{a,b}` for one of
several."""

import re
from functools import cache


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*|\{[^{}]*\})", pattern)
    spelled = []
    for part in parts:
        if part == "*":
            spelled.append(".*")
        elif part.startswith("{"):
            spelled.append("(?:" + "|".join(re.escape(choice.strip()) for choice in part[1:-1].split(",")) + ")")
        else:
            spelled.append(re.escape(part))
    return re.compile("".join(spelled))


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` covers the whole of `name`, e.g. `blocks.*.{up,down}` covers `blocks.3.mlp.up`."""
    return _compiled(pattern).fullmatch(name) is not None
