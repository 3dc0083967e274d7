"""Masks of attention: the condition under which a query attends to a key, as an expression over their positions."""

from dataclasses import dataclass
from functools import lru_cache

from .interval import WORK, Undecided, atoms, example, largest_distance, negation, over_tile, python_function, truth
from .parse import Positions, parse, reread
from .simplify import simplify
from .values import ALWAYS, NEVER, Call, Compare, Const, Expr, ExprError, Logic, Var, rebuild, substitute, variables

CAUSAL = "j <= i"
FARTHEST = 1 << 20  # positions below this are covered by proofs
NEAREST = 4096  # fewest positions that proofs cover
NUMBERS = ("heads", "context")  # numbers of the model that an expression may read
POSITIONS = ("i", "j", "h")
LANGUAGE = Positions((*POSITIONS, *NUMBERS), condition=True)
SAME = Compare("==", Call("document", (Var("i"),)), Call("document", (Var("j"),)))
LEAF = 8  # tiles of at most this many positions are counted pair by pair


def parse_mask(text: str) -> Expr:
    """Parses a mask.

    Raises:
        ExprError: if the text is not a condition over whole numbers i, j, h, `heads` and `context`.
    """
    return parse(text, (*POSITIONS, *NUMBERS), LANGUAGE)


@lru_cache(maxsize=256)
def bound_mask(text: str, heads: int, context: int) -> str:
    """Returns the canonical text of a mask with the numbers of the model. Masks that equal the causal one are `j <= i`.

    Raises:
        ExprError: if the text is no mask, if the mask lets a query attend to a later key, which the message states, or
            if no proof is found that it does not.
    """
    numbers = {"heads": Const(heads), "context": Const(context)}
    condition = simplify(substitute(parse_mask(text), numbers))
    refuse_later_keys(condition, heads, context)
    hidden = Logic("and", (Compare("<=", Var("j"), Var("i")), negation(condition)))
    return CAUSAL if _found(hidden, heads, context) is None else str(condition)


def refuse_later_keys(condition: Expr, heads: int, context: int) -> None:
    """Raises ExprError, with a pair of positions, if a mask lets a query attend to a later key."""
    pair = _found(Logic("and", (condition, Compare(">", Var("j"), Var("i")))), heads, context)
    if pair is not None:
        i, j, h = pair
        where = f" in head {h}" if "h" in variables(condition) else ""
        raise ExprError(
            f"the mask is not causal: the query at i = {i} attends to the key at j = {j}{where}",
            hint=f"add the condition j <= i: `{CAUSAL} and ...`",
        )


@lru_cache(maxsize=256)
def sees_itself(text: str) -> bool:
    """Returns whether under a canonical mask each query is proved to attend to the key at its own position."""
    condition = with_documents(reread(text, LANGUAGE), ALWAYS)
    hidden = substitute(negation(condition), {"j": Var("i")})
    try:
        return example(hidden, FARTHEST, NEAREST) is None
    except Undecided:
        return False


def _found(condition: Expr, heads: int, context: int) -> tuple[int, int, int] | None:
    """Returns i, j and h for which a condition holds, for some documents; None if there are none."""
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
    """Returns a condition with `same` for the condition that both positions lie in one document."""
    if isinstance(condition, Compare):
        opposite = Compare("!=", SAME.a, SAME.b)
        return same if condition == SAME else negation(same) if condition == opposite else condition
    return rebuild(condition, lambda part: with_documents(part, same))


@dataclass(frozen=True, slots=True)
class Mask:
    """A causal mask.

    Attributes:
        text: its canonical text.
        condition: the condition over i, j, h and, if it reads documents, `start`: the position at which the document of
            the query starts. For keys up to the query's position, document(i) == document(j) is j >= start.
        heads: the number of query heads.
    """

    text: str
    condition: Expr
    heads: int

    @staticmethod
    @lru_cache(maxsize=256)
    def of(text: str, heads: int) -> "Mask":
        """Returns the mask of a canonical text, as `bound_mask` returns it."""
        condition = with_documents(reread(text, LANGUAGE), Compare(">=", Var("j"), Var("start")))
        return Mask(text, condition, heads)

    @property
    def plain(self) -> bool:
        """Whether each query attends to all keys up to its position."""
        return self.text == CAUSAL

    @property
    def documents(self) -> bool:
        return "start" in variables(self.condition)

    @property
    def any(self) -> Expr:
        """The condition that a tile may have a pair that is not masked.

        Tiles have the inclusive bounds i0 and i1, j0 and j1, and the document starts start0 and start1 of i0 and i1.
        """
        return self._over_tile(0)

    @property
    def all(self) -> Expr:
        """The condition that no pair of a tile is masked, over the variables of `any`."""
        return self._over_tile(1)

    def _over_tile(self, which: int) -> Expr:
        heads = {"h0": Const(0), "h1": Const(self.heads - 1)}
        return over_tile(substitute(truth(self.condition)[which], heads))

    def pairs(self, tokens: int) -> int:
        """Returns the number of unmasked pairs of a query and a key of a sequence of one document, averaged over heads.

        The number is exact for masks that depend only on i - j, and up to 4,096 tokens. For others, tiles that are
        masked in part are sampled.
        """
        return _count(self.text, self.heads, tokens)


@lru_cache(maxsize=256)
def window_of(text: str, heads: int, context: int) -> tuple[int, int] | None:
    """Returns numbers (first, window) such that queries attend only to keys j < first and i - j < window.

    The window is the smallest for the smallest number of first keys. Returns None if both together are more than three
    quarters of `context`.
    """
    condition = with_documents(reread(text, LANGUAGE), ALWAYS)
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
def _count(text: str, heads: int, tokens: int) -> int:
    condition = with_documents(reread(text, LANGUAGE), ALWAYS)
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
