"""The pre-tokenizers for tiktoken rank files. A pre-tokenizer is a regular expression that cuts a document into pieces
for BPE.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# The characters that `\s` matches in the regex engine of tiktoken (Unicode White_Space), unlike in `re`.
_WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_IN_LINE = _WHITE.replace("\t-\r", "\t\x0b\x0c")


@dataclass(frozen=True, slots=True)
class Pattern:
    r"""A pre-tokenizer, and the white-space characters that it treats specially.

    The pattern `\s+(?!\S)` backtracks by recursion. A run of a million white-space characters overflows the stack of
    the regex engine. `segments` therefore first cuts the text at long runs, at positions where the pattern also cuts.

    Attributes:
        regex: the regular expression. Its matches are the pieces.
        white: the characters that `\s+(?!\S)` matches. The last character of a run belongs to the next piece.
    """

    regex: str
    white: str

    @property
    def onig(self) -> str:
        return re.sub(r"([+*?}])\+", r"\1", self.regex).replace("$", r"\z")

    def segments(self, text: str) -> list[str]:
        """Cuts `text` before each long run of white space, and before the last character of the run."""
        cuts = [0]
        for match in re.finditer(f"[{self.white}]{{2000,}}+(?![{_WHITE}])", text):
            if match.end() < len(text):  # a run at the end matches without backtracking
                cuts += [match.start(), match.end() - 1]
        return [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True) if a < b]


# Possessive quantifiers and `\s++$` match the same pieces as greedy quantifiers, without backtracking. `gpt4` is copied
# from tiktoken: blank lines at the end of a document are one piece.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++"
_REST = r" ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]+|\s++$|\s+(?!\S)|\s+"
PATTERNS: Mapping[str, Pattern] = {
    "gpt2": Pattern(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s", _WHITE),
    "gpt4": Pattern(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
        r"|\s+(?!\S)|\s",
        _IN_LINE,
    ),
    "llama3": Pattern(rf"{_WORDS}|\p{{N}}{{1,3}}+|{_REST}", _IN_LINE),
    "qwen": Pattern(rf"{_WORDS}|\p{{N}}|{_REST}", _IN_LINE),
    "nanochat": Pattern(rf"{_WORDS}|\p{{N}}{{1,2}}+|{_REST}", _IN_LINE),
}
