"""Lists of blocks of attention scores, for attention libraries. One list has the blocks in which some query-key pairs,
but not all, are masked. The other list has the blocks without masked pairs."""

from typing import NamedTuple

from specc.compiler.expr.mask import Mask
from specc.compiler.expr.spell import triton_text
from specc.compiler.kernels.attention.scored_context import START_BOUNDS
from specc.compiler.kernels.lines import listed, nested


class BlockLists(NamedTuple):
    """The context of templates/triton/attention_blocks.jinja: a kernel that lists blocks, and its launch function.

    Attributes:
        queries: The number of queries of a block.
        keys: The number of keys of a block.
        kernel: The signature of the kernel.
        starts: Lines of the kernel that load the first positions of documents.
        some: The line that computes whether at least one pair of a block is not masked.
        every: The line that computes whether a block has no masked pair.
        function: The signature of the function that launches the kernel.
        launch: The statement that launches the kernel.
        sequences: The number of sequences for which blocks are listed, as an expression.
    """

    queries: int
    keys: int
    kernel: str
    starts: tuple[str, ...]
    some: str
    every: str
    function: str
    launch: str
    sequences: str

    @staticmethod
    def of(mask: Mask, queries: int, keys: int) -> "BlockLists":
        """Returns the template context for a mask. A block has `queries` queries and `keys` keys."""
        start = ["start"] if mask.documents else []
        pointers = [*(f"{name}_ptr" for name in start), "counts_ptr", "order_ptr", "T", "N"]
        pointers += ["START_STRIDE"] if start else []
        sizes = [f"{name}: tl.constexpr" for name in ("QUERIES", "KEYS", "BY_KEYS", "MOST")]
        arguments = [*start, "counts", "order", "t", "others", *(["start.stride(0)"] if start else [])]
        sequences = "len(start)" if start else "1"
        parameters = ["q: Tensor", *(f"{name}: Tensor" for name in start), "by_keys: bool"]
        return BlockLists(
            queries=queries,
            keys=keys,
            kernel=listed("def blocks_kernel(", [*pointers, *sizes], "):"),
            starts=tuple(line.replace(") * T + i", ") * START_STRIDE + i") for line in START_BOUNDS if start),
            some=nested("some", triton_text(mask.any, whole=True)),
            every=nested("every", triton_text(mask.all, whole=True)),
            function=listed("def list_blocks(", parameters, ") -> list[Tensor]:"),
            launch=listed(
                f"blocks_kernel[(rows, {sequences})](",
                [*arguments, "QUERIES", "KEYS", "by_keys", "most", "num_warps=1"],
                ")",
                indent=4,
            ).lstrip(),
            sequences=sequences,
        )
