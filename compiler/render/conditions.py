"""Conditions in generated code that distinguish the variants of a function."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from specc.compiler.passes.merge import Merged, Where
from specc.compiler.records import record

STATE = ("cache", "state")  # the arguments that hold the state of earlier tokens
TEST = re.compile(r"\b(?:if|and|or)\b")  # the words that precede the facts that a line tests
NOWHERE: Where = frozenset()


class Indistinguishable(LookupError):
    """Raised if no condition distinguishes the variants of a function, so that the variants cannot be rendered as one
    function."""


@record
class Fact:
    """A condition in generated code that holds in the variants `where`, and in no other variants.

    `name` is an argument or an attribute, which is never reassigned. If `optional`, the condition is
    `name is not None`. Otherwise, the condition is `name`.
    """

    name: str
    where: Where
    optional: bool = False

    def text(self, holds: bool) -> str:
        if self.optional:
            return f"{self.name} is {'not ' * holds}None"
        return f"{'not ' * (not holds)}{self.name}"


@record
class Condition:
    """A condition in generated code: the source texts `tests`, joined by `word`. `names` are the names of the tested
    facts."""

    names: frozenset[str]
    word: str
    tests: tuple[str, ...]

    @property
    def text(self) -> str:
        return f" {self.word} ".join(self.tests)

    def joined(self, word: str, other: "Condition") -> "Condition":
        return Condition(self.names | other.names, word, (*self._part(word), *other._part(word)))

    def _part(self, word: str) -> tuple[str, ...]:
        """Returns the tests of this condition, for a condition that joins tests by `word`. If this condition joins
        several tests by another word, returns one test in parentheses."""
        return self.tests if len(self.tests) == 1 or self.word == word else (f"({self.text})",)


def facts_of(merged: Merged, optional: Mapping[str, Where], flags: Mapping[str, Where]) -> list[Fact]:
    """Returns the conditions on arguments that distinguish the variants of a function, in order of preference.

    Args:
        merged: the merged graphs of the variants.
        optional: the variants that have each optional argument.
        flags: the variants in which each flag is true.
    """
    facts = [Fact(name, where, True) for name, where in optional.items()]
    facts += [Fact(flag, where) for flag, where in flags.items()]
    return [fact for fact in facts if fact.where and fact.where != merged.every]


class Conditions:
    """Finds conditions that distinguish sets of variants."""

    def __init__(self, merged: Merged, facts: Sequence[Fact]) -> None:
        self._merged, self._facts = merged, facts
        self._known: dict[tuple[Where, Where], Condition] = {}

    def of(self, where: Where, every: Where) -> Condition:
        """Returns a condition that is true in the variants `where`, and false in the other variants of `every`. Raises
        Indistinguishable if no facts distinguish these variants."""
        if (where, every) not in self._known:
            self._known[where, every] = self._shortest(where, every) or self._divided(where, every)
        return self._known[where, every]

    def _shortest(self, where: Where, every: Where) -> Condition | None:
        """Returns the shortest condition for the variants `where` that joins tests by only `and` or by only `or`.
        Returns None if there is no such condition."""
        slots = (slot for slot in self._merged.slots if slot.where == where)
        read = {ref for slot in slots for operand in slot.inputs for ref, _ in operand}
        facts = sorted(self._facts, key=lambda fact: fact.name not in STATE and fact.name not in read)
        options = [
            (fact.name, fact.text(holds), variants)
            for fact in facts
            for holds, variants in ((True, every & fact.where), (False, every - fact.where))
            if variants <= where or where <= variants
        ]
        for size in range(1, 7):
            for some in combinations(options, size):
                names, texts, variants = zip(*some, strict=True)
                for word, combined in (("and", frozenset.intersection), ("or", frozenset.union)):
                    if combined(*variants) == where:
                        return Condition(frozenset(names), word, texts)
        return None

    def _divided(self, where: Where, every: Where) -> Condition:
        """Returns a condition that is true for the variants in `where`, and false for the other variants of `every`.
        The condition joins tests by both `and` and `or`.

        One fact (a condition on an argument or attribute) divides the variants `every` into two parts, and each part
        has a separate condition. A part needs no further test if all of its variants are in `where`, or if none of its
        variants is in `where`. Of all facts, the method chooses the fact for which the parts that need further tests
        contain the fewest variants.
        """

        def parts(fact: Fact) -> Iterator[tuple[Condition, Where, Where]]:
            for holds, part in ((True, every & fact.where), (False, every - fact.where)):
                yield Condition(frozenset((fact.name,)), "and", (fact.text(holds),)), where & part, part

        def undecided(fact: Fact) -> int:
            return sum(len(part) for _, within, part in parts(fact) if within not in (NOWHERE, part))

        options = [fact for fact in self._facts if fact.where & every not in (NOWHERE, every)]
        if not options:
            names = f"{sorted(where)} of the variants {sorted(every)} of {self._merged.variants[0].name}"
            raise Indistinguishable(f"no facts distinguish {names}")
        fact = min(options, key=undecided)
        constant = any(within == part for _, within, part in parts(fact))
        terms = []
        for test, within, part in parts(fact):
            if within == part:
                terms.append(test)
            elif within:
                inner = self.of(within, part)
                terms.append(inner if constant else test.joined("and", inner))
        return terms[0] if len(terms) == 1 else terms[0].joined("or", terms[1])
