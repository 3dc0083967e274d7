"""Every kind of block is in a case of the tests beside this one."""

from collections.abc import Mapping

import test_attention_layers
import test_connections
import test_embeddings_and_heads
import test_fused_blocks
import test_mlp_layers
import test_norms_and_biases
from tiny_models import ATTENTION, MLP

from specc.compiler import blocks
from specc.compiler.blocks.parts import Embed, Layer, Norm
from specc.compiler.catalog import models
from specc.compiler.strict import tag_of

MODULES = (
    test_attention_layers,
    test_connections,
    test_embeddings_and_heads,
    test_fused_blocks,
    test_mlp_layers,
    test_norms_and_biases,
)


def test_every_kind_of_block_is_in_a_case() -> None:
    wanted = {tag_of(model, "kind") for role in (Embed, Layer, Norm) for model in models(blocks, role, "kind")}
    used: set[object] = {"rms"}  # the default

    def collect(value: object) -> None:
        if isinstance(value, Mapping):
            used.add(value.get("kind"))
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect([[module.CASES for module in MODULES], ATTENTION, MLP, {"kind": "token"}])
    assert wanted <= used
