"""Mask expressions of attention. A mask is a condition of the positions of a query and a key. The query attends to the
key if the condition holds.

The positions of documents, which a mask can read, are computed in compiler/blocks/document_mask.py.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from .interval import WORK, Undecided, atoms, example, largest_distance, negation, over_tile, python_function, truth
from .parse import Positions, alternatives, parse, reread
from .simplify import simplify
from .traverse import rebuild, substitute, variables
from .values import ALWAYS, NEVER, Binary, Call, Compare, Const, Expr, ExprError, Logic, Var

CAUSAL = "j <= i"
FARTHEST = 1 << 20  # a proof first tries to cover all positions below this
NEAREST = 4096  # if that fails, the proof covers the context, but at least this many positions
SIZES = ("dim", "kv_heads", "head_dim", "values")
NUMBERS = ("heads", "context", "prefix", *SIZES)  # numbers of the model and the layer that an expression may read
Sizes = tuple[tuple[str, int], ...]
POSITIONS = ("i", "j", "h")
LANGUAGE = Positions((*POSITIONS, *NUMBERS), condition=True)
SAME = Compare("==", Call("document", (Var("i"),)), Call("document", (Var("j"),)))
EARLIER = Compare("<=", Var("j"), Var("i"))
LATER = Compare(">", Var("j"), Var("i"))
LEAF = 8  # tiles of at most this many positions are counted pair by pair


def parse_mask(text: str) -> Expr:
    """Parses a mask.

    Raises:
        ExprError: If the text is not a condition of the whole numbers i, j, h and NUMBERS.
    """
    return parse(text, (*POSITIONS, *NUMBERS), LANGUAGE)


@lru_cache(maxsize=256)
def bound_mask(text: str, heads: int, context: int, prefix: int = 0, sizes: Sizes = ()) -> str:
    """Returns the canonical text of a mask. In this text, numbers replace names such as `context`. A mask that is
    equivalent to the causal mask becomes `j <= i`.

    Args:
        text: The mask.
        heads: The number of query heads.
        context: The number of tokens of a sequence.
        prefix: The number of tokens at the start of a sequence that may attend to each other.
        sizes: The values of the names in SIZES.

    Raises:
        ExprError: If the text is not a mask, or if a query may attend to a later key outside of the prefix. The message
            states the query and the key.
    """
    if text == CAUSAL:  # the mask of most models, which needs no search for a pair of a query and a key
        return text
    numbers = numbers_of(heads, context, prefix, sizes)
    condition = simplify(with_numbers(parse_mask(text), numbers))
    _refuse_later_keys(text, condition, numbers, heads, context)
    if prefix and sees_later(str(condition), heads):
        if with_documents(condition, ALWAYS) != condition:
            message = "a mask that calls `document` lets a query attend to a later key, whose document is not known yet"
            raise ExprError(message, hint=f"add the condition j <= i: `{CAUSAL} and ...`")
        return str(condition)
    hidden = Logic("and", (Compare("<=", Var("j"), Var("i")), negation(condition)))
    return CAUSAL if find_pair(hidden, heads, context) is None else str(condition)


def of_tokens(condition: Expr, block: int) -> Expr:
    """Converts a mask of blocks to a mask of tokens. In a mask of blocks, j is the first position of a block."""
    return substitute(condition, {"j": Binary("//", Var("j"), Const(block)) * block})


BLOCKS = Positions((*LANGUAGE.whole, "block"), condition=True)


@lru_cache(maxsize=256)
def bound_blocks(text: str | None, mask: str, block: int, heads: int, context: int, prefix: int = 0) -> str:
    """Returns the mask of pooled blocks as canonical text. In this text, numbers replace names such as `context`.

    Args:
        text: The mask, in terms of the query position `i`, the block's first position `j`, the head `h` and the block
            size `block`. By default, a block is visible if all tokens of the block precede the query, and if the mask
            of single tokens hides the first token of the block.
        mask: The mask of single tokens.
        block: The number of tokens per block.
        heads: The number of query heads.
        context: The number of tokens of a sequence.
        prefix: The number of tokens at the start of a sequence that may attend to each other.

    Raises:
        ExprError: If the text is not a mask, if no query attends to a block, or if a query may attend to a block with a
            later token. The message states the query and the token.
    """
    whole = Compare("<=", Var("j") + (block - 1), Var("i"))
    condition: Expr = NEVER
    numbers = {"heads": heads, "context": context, "prefix": prefix, "block": block}
    constants = {name: Const(number) for name, number in numbers.items()}
    if text is None:
        tokens = substitute(parse_mask(mask), constants)
        parts = tokens.parts if isinstance(tokens, Logic) and tokens.op == "and" else (tokens,)
        hidden = tuple(negation(with_documents(part, ALWAYS)) for part in parts if part not in (SAME, EARLIER))
        outside = hidden if len(hidden) == 1 else (Logic("or", hidden),)
        documents = (SAME,) if "document" in mask else ()
        if hidden:
            condition = Logic("and", (whole, *outside, *documents))
    else:
        condition = with_numbers(parse(text, BLOCKS.whole, BLOCKS), constants)
    condition = simplify(condition)
    visible = False
    for same in dict.fromkeys((ALWAYS, NEVER)):
        of_block = of_tokens(with_documents(condition, same), block)
        pair = find_pair(Logic("and", (of_block, LATER)), heads, context)
        if pair is not None:
            i, j, h = pair
            where = f" in head {h}" if "h" in variables(condition) else ""
            message = f"`pool.mask` is not causal: the query at i = {i} attends to the block of token {j}{where}"
            raise ExprError(message, hint="add the condition that the block is whole: `j + block <= i + 1 and ...`")
        visible = visible or find_pair(of_block, heads, context) is not None
    if not visible:
        message = "no query attends to a pooled block"
        raise ExprError(
            message, hint="let `mask` leave out older tokens, such as `mask: j <= i and i // 64 - j // 64 < 4`"
        )
    return str(condition)


def numbers_of(heads: int, context: int, prefix: int, sizes: Sizes) -> Mapping[str, Const]:
    known = {**dict(sizes), "heads": heads, "context": context, "prefix": prefix}
    return {name: Const(known[name]) for name in NUMBERS if name in known}


def with_numbers(expr: Expr, numbers: Mapping[str, Const]) -> Expr:
    """Returns the expression with the values in `numbers` in place of names such as `context`. Raises ExprError if a
    name has no value."""
    bound = substitute(expr, numbers)
    if unknown := [name for name in variables(bound) if name in NUMBERS]:
        raise ExprError(f"{unknown[0]} has no value in this layer", hint=f"choose from {', '.join(sorted(numbers))}")
    return bound


def _refuse_later_keys(text: str, condition: Expr, numbers: Mapping[str, Const], heads: int, context: int) -> None:
    """Raises ExprError if a mask lets a query attend to a later key outside of the prefix. `text` is the mask as
    written, and `condition` is the mask with `numbers` in place of names. If the mask is an `or`, the error points to
    the operand that admits the key."""
    prefix = numbers["prefix"]
    pair = find_pair(Logic("and", (condition, LATER, Compare(">=", Var("j"), prefix))), heads, context)
    if pair is not None:
        i, j, h = pair
        where = f" in head {h}" if "h" in variables(condition) else ""
        where += f", outside the prefix of {prefix}" if prefix.value else ""
        message = f"the mask is not causal: the query at i = {i} attends to the key at j = {j}{where}"
        column = next(
            (
                column
                for part, column in alternatives(text, LANGUAGE)
                for same in (ALWAYS, NEVER)
                if python_function(with_documents(simplify(substitute(part, numbers)), same), POSITIONS)(*pair)
            ),
            0,
        )
        raise ExprError(message, column, f"add the condition j <= i: `{CAUSAL} and ...`")


@lru_cache(maxsize=256)
def sees_later(text: str, heads: int) -> bool:
    """Returns whether a canonical mask lets a query attend to a later key. In a valid mask, only queries in the prefix
    attend to later keys."""
    return text != CAUSAL and find_pair(Logic("and", (reread(text, LANGUAGE), LATER)), heads, NEAREST) is not None


@lru_cache(maxsize=256)
def require_visible(text: str, heads: int, context: int) -> None:
    """Raises ExprError if a canonical mask is false for all queries and keys of a sequence of `context` tokens."""
    condition = reread(text, LANGUAGE)
    try:
        hidden = not any(example(with_documents(condition, same), context, heads) for same in (ALWAYS, NEVER))
    except Undecided:
        return
    if hidden:
        message = f"the mask is false for every query and key of {context:,} tokens"
        raise ExprError(message, hint="change the condition, or remove the layer")


@lru_cache(maxsize=256)
def sees_itself(text: str) -> bool:
    """Returns whether a canonical mask provably lets each query attend to the key at its own position."""
    condition = with_documents(reread(text, LANGUAGE), ALWAYS)
    hidden = substitute(negation(condition), {"j": Var("i")})
    try:
        return example(hidden, FARTHEST, NEAREST) is None
    except Undecided:
        return False


def find_pair(condition: Expr, heads: int, context: int) -> tuple[int, int, int] | None:
    """Returns i, j and h for which a condition holds. The positions i and j may be in one document or in different
    documents. Returns None if the condition never holds."""
    for same in (ALWAYS, NEVER):
        decided = with_documents(condition, same)
        try:
            pair = example(decided, FARTHEST, heads, WORK // 10)
        except Undecided:
            pair = example(decided, max(NEAREST, context), heads)
        if pair is not None or decided == condition:
            return pair
    return None


def with_documents(condition: Expr, same: Expr) -> Expr:
    if isinstance(condition, Compare):
        opposite = Compare("!=", SAME.a, SAME.b)
        return same if condition == SAME else negation(same) if condition == opposite else condition
    return rebuild(condition, lambda part: with_documents(part, same))


def in_some_documents(condition: Expr) -> Expr:
    """Returns a condition that does not read documents. The result is true if `condition` holds with i and j in one
    document, or with i and j in different documents."""
    cases = tuple(dict.fromkeys(with_documents(condition, same) for same in (ALWAYS, NEVER)))
    return cases[0] if len(cases) == 1 else Logic("or", cases)


class Mask(NamedTuple):
    """A causal mask.

    Attributes:
        text: The canonical text.
        condition: The condition in terms of i, j, h and `start`, the first position of the query's document. For keys
            up to the query, document(i) == document(j) is equivalent to j >= start.
        heads: The number of query heads.
    """

    text: str
    condition: Expr
    heads: int

    @staticmethod
    @lru_cache(maxsize=256)
    def of(text: str, heads: int) -> "Mask":
        condition = with_documents(reread(text, LANGUAGE), Compare(">=", Var("j"), Var("start")))
        return Mask(text, condition, heads)

    @property
    def plain(self) -> bool:
        return self.text == CAUSAL

    @property
    def documents(self) -> bool:
        return "start" in variables(self.condition)

    @property
    def any(self) -> Expr:
        """The condition that a tile has at least one pair that is not masked.

        The condition reads the inclusive bounds i0, i1, j0 and j1 of the tile. The condition also reads start0 and
        start1, the positions at which the documents of i0 and i1 begin.
        """
        return self._over_tile(0)

    @property
    def all(self) -> Expr:
        """The condition that no pair of a tile is masked, in the variables of `any`."""
        return self._over_tile(1)

    def _over_tile(self, which: int) -> Expr:
        heads = {"h0": Const(0), "h1": Const(self.heads - 1)}
        return over_tile(substitute(truth(self.condition)[which], heads))

    def pairs(self, tokens: int) -> int:
        """Returns the number of unmasked query-key pairs in a sequence of one document, averaged over heads.

        The number is exact for up to 4,096 tokens, and for masks that depend only on i - j. In other cases, partly
        masked tiles are sampled.
        """
        return _count(with_documents(reread(self.text, LANGUAGE), ALWAYS), self.heads, tokens)

    def block_pairs(self, block: int, tokens: int) -> int:
        """For a mask of blocks, returns the number of unmasked pairs of a query and a block, averaged over heads. The
        sequence has one document of `tokens` tokens. The number is exact for up to 4,096 tokens."""
        condition = with_documents(reread(self.text, LANGUAGE), ALWAYS)
        return _count(of_tokens(condition, block), self.heads, tokens) // block


@lru_cache(maxsize=256)
def window_of(text: str, heads: int, context: int) -> tuple[int, int] | None:
    """Returns (first, window) if each query i attends only to keys j with j < first or i - j < window.

    `first` is the smallest possible number, and `window` is the smallest number for this `first`. Returns None if first
    + window exceeds three quarters of `context`.
    """
    condition = in_some_documents(reread(text, LANGUAGE))
    numbers = {int(part.value) for part in atoms(condition) if isinstance(part, Const) and 0 < part.value < context}
    for first in sorted({0, *numbers, *(number + 1 for number in numbers)}):
        try:
            farthest = largest_distance(
                Logic("and", (condition, Compare(">=", Var("j"), Const(first)))), context, heads
            )
        except Undecided:
            continue
        window = 1 if farthest is None else farthest + 1
        if 4 * (first + window) <= 3 * context:
            return first, window
    return None


@lru_cache(maxsize=1024)
def _count(condition: Expr, heads: int, tokens: int) -> int:
    shifted = simplify(substitute(condition, {"i": Var("j") + Var("d")}))
    if set(variables(shifted)) == {"d"}:
        allows = python_function(shifted, ("d",))
        return sum(tokens - d for d in range(tokens) if allows(d))
    names = ("i0", "i1", "j0", "j1", "h0", "h1")
    some, every = (python_function(over_tile(part), names) for part in truth(condition))
    holds = python_function(condition, POSITIONS)
    chosen = range(heads) if "h" in variables(condition) else range(1)
    leaf = max(LEAF, -(-tokens // 512))
    total = 0.0
    for h in chosen:
        waiting = [(0, tokens, 0, tokens)]
        while waiting:
            i0, i1, j0, j1 = waiting.pop()
            bounds = (i0, i1 - 1, j0, j1 - 1, h, h)
            if i0 >= i1 or j0 >= j1 or not some(*bounds):
                continue
            area = (i1 - i0) * (j1 - j0)
            if every(*bounds):
                total += area
            elif max(i1 - i0, j1 - j0) <= leaf:
                step = -(-max(i1 - i0, j1 - j0) // LEAF)
                sample = [holds(i, j, h) for i in range(i0, i1, step) for j in range(j0, j1, step)]
                total += area * sum(sample) / len(sample)
            else:
                i, j = (i0 + i1) // 2, (j0 + j1) // 2
                waiting += [(a, b, c, d) for a, b in ((i0, i), (i, i1)) for c, d in ((j0, j), (j, j1))]
    return round(total / len(chosen))
