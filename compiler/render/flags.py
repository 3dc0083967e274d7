"""Boolean arguments of generated methods, called flags, which select the code of a program or of a variant of a
block."""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from specc.compiler.int8.fake_quantize import SUFFIX
from specc.compiler.ir.graph import Graph
from specc.compiler.passes.fp8_products import SUFFIX as FP8_SUFFIX
from specc.compiler.passes.merge import Where
from specc.compiler.passes.roll import field_of, method_of
from specc.compiler.programs.programs import Programs, owner

ONCE = "_once"
PHASE = "phase"
PLAIN = ("forward", "score")  # methods that no flag selects
Flags = frozenset[str]


def flags_of(programs: Programs) -> Mapping[str, Flags]:
    """Returns the flags of each program.

    `training`: the program trains. `rounded`: the program fake-quantizes the inputs of products. `once`: the program
    runs each block once. If the blocks have special methods for a phase of training, the name of these methods is also
    a flag.
    """
    trains = {"train", *(phase.train.removesuffix(SUFFIX) for phase in programs.phases)}
    flags = {}
    for graph in programs.programs:
        name, plain = graph.name, graph.name.removesuffix(SUFFIX)
        holds = {"training": plain in trains, "rounded": name != plain, "once": plain.endswith(ONCE)}
        methods = {_plain(method_of(node)) for node in graph.nodes if field_of(node)}
        phases = {method for method in methods if method.startswith(PHASE)}
        flags[name] = frozenset((*(flag for flag, true in holds.items() if true), *phases))
    return flags


def _plain(method: str) -> str:
    return method.removesuffix(FP8_SUFFIX).removesuffix(SUFFIX)


def flag_variants(flags: Sequence[Flags]) -> dict[str, Where]:
    names = dict.fromkeys(flag for some in flags for flag in sorted(some))
    return {name: frozenset(i for i, some in enumerate(flags) if name in some) for name in names}


def block_variants(
    functions: Sequence[Graph], callers: Mapping[str, Collection[Flags]]
) -> Sequence[tuple[Graph, Flags]]:
    """Returns the variants of a method of blocks: each function that the method contains, with the flags that select
    the function.

    A function has the flags of the programs that call the function. If programs with different flags call a function,
    the function has several variants. A flag is omitted if the other flags already distinguish all functions of a
    block. The flag `cache` selects the function `extend`, which extends a cache. Any other function, except `forward`,
    `score` and the functions of a training phase, has its name as its flag.

    Args:
        functions: The functions.
        callers: For each function, the flags of the programs that call the function.
    """
    kinds: dict[tuple[str, Flags], list[str]] = {}
    for graph in functions:
        kinds.setdefault((owner(graph.name), _named_flags(graph)), []).append(graph.name)
    pairs = [
        (a, b)
        for names in kinds.values()
        for one, other in combinations(names, 2)
        for a in callers[one]
        for b in callers[other]
        if a != b
    ]
    names = {flag for a, b in pairs for flag in a ^ b}
    for flag in sorted(names, key=lambda flag: (flag != "once", flag != "training", flag)):
        if all((a ^ b) & names != {flag} for a, b in pairs):
            names.remove(flag)
    chosen = {name: dict.fromkeys(flags & names for flags in some) for name, some in callers.items()}
    return [(graph, _named_flags(graph) | flags) for graph in functions for flags in chosen[graph.name]]


def _named_flags(graph: Graph) -> Flags:
    plain = _plain(graph.name.partition(".")[2])
    if plain in PLAIN or plain.startswith(PHASE):
        return frozenset()
    return frozenset(("cache" if plain == "extend" else plain,))
