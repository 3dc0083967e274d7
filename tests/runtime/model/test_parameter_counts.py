"""The committed models of other projects have the parameters of their sources."""

from pathlib import Path

import pytest

from specc.compiler import pipeline
from specc.compiler.spec.check import load

SPECS = Path(__file__).parents[3] / "specs"
PUBLISHED = {
    "qwen3_0p6b": 596_049_920,
    "llama3_1b": 1_235_814_400,
    "gemma3_1b": 999_885_952,
    "nanochat_d12": 286_261_730,
}


def count(name: str) -> int:
    return sum(param.count for param in pipeline.lower(load(SPECS / f"{name}.yaml")[0], "cpu").params)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    assert count(name) == PUBLISHED[name]


def test_modded_gpt_has_the_parameters_of_its_source_less_those_that_are_missing() -> None:
    """Sizes of the source, without the padding of its banks; what is missing is in DECISIONS.md."""
    vocab, dim, layers, heads = 50304, 768, 11, 6
    attention, mlp = 4 * dim * dim, 8 * dim * dim
    source = {
        "embedding, head and five value embeddings": 7 * vocab * dim,
        "matrices": (layers - 1) * attention + layers * mlp,
        "gates of value embeddings": 5 * heads * 12,
        "smear": 12 + 1,
        "factors of x, of outputs, and of q, k, v and out": 2 * layers + 2 * layers + 2 * layers,
        "skip": 1,
        "pairs of tokens": 50304 * 15 // 2 * dim,
        "hidden layers of gates": 4 * 64 * dim,
        "gates": 2 * (41 * 64 + 41) + 2 * (14 * 64 + 14) + 1,
    }
    missing = {
        "pairs of tokens": source["pairs of tokens"],
        "factors of q, k and v, of out, of x and of outputs in layer 6, which has no attention": 4,
        "three of four hidden layers": 3 * 64 * dim,
        "gates but those of x0 in four layers and of the heads of layer 3": source["gates"] - 1 - 10 * 65,
    }
    added = {"numbers in place of gates of x0 in layers 4, 5 and 7 to 10": 6, "backout": 1}
    assert count("modded_gpt") == sum(source.values()) - sum(missing.values()) + sum(added.values())
