"""The template context for attention over a cache, and the tile of its kernel."""

from specc.compiler.errors import counted
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.attention.attention import table_name
from specc.compiler.kernels.attention.score_tile import NARROWEST
from specc.compiler.kernels.generated import GeneratedFunction, number_of
from specc.compiler.kernels.kernel import Site
from specc.compiler.kernels.tile import between, power
from specc.compiler.ops.caches.cached_attention import CachedBase
from specc.compiler.ops.caches.key_value_cache import LARGEST
from specc.compiler.records import record


@record
class CachedTile:
    """The tile of a program instance. A program instance has `warps` warps, and reads `keys` keys at a time, with
    `stages` reads in flight.

    The keys of a text are split into parts, one per program instance. The number of parts is chosen so that each
    multiprocessor has up to `programs` program instances.

    Raises ValueError if a field is out of its bounds.
    """

    keys: int
    warps: int
    stages: int
    programs: int

    def __post_init__(self) -> None:
        power("keys", self.keys, NARROWEST, 256)
        power("warps", self.warps, 1, 16)
        between("stages", self.stages, 1, 8)
        between("programs", self.programs, 1, 32)

    def __str__(self) -> str:
        each = f"{counted(self.programs, 'program')} a multiprocessor"
        return f"{counted(self.keys, 'key')}, {counted(self.warps, 'warp')}, {counted(self.stages, 'stage')}, {each}"

    def loaded_bytes(self, row: int) -> int:
        """Returns the bytes of shared memory for a program instance's loads in flight, at `row` bytes per position."""
        return self.stages * self.keys * row


@record
class Loop:
    """A loop over tiles of keys.

    Attributes:
        span: The bounds of the loop.
        keys: Lines that locate a tile of keys. The lines define the positions `j`, the row indices `at`, and the mask
            `inside`.
        scores: Lines that compute the scores x.
        new: The prefix of tensor names. The prefix is "new_" if the loop reads rows of the input tokens, which a ring
            buffer does not hold yet. The prefix is "" if the loop reads rows of the cache.
    """

    span: str
    keys: tuple[str, ...]
    scores: tuple[str, ...]
    new: str = ""


@record
class CachedContext:
    """The context of templates/triton/cached_attention.py.jinja, which includes cached_attention_ranges.jinja.

    Attributes:
        how: A description of the kernels' algorithm.
        settings: Lines that assign constants, for the tile and for the layout of the cache.
        helpers: Templates of functions that the kernels call.
        pdl: Whether a kernel may begin before the preceding kernel ends (programmatic dependent launch).
        finish, join: The signatures of two Triton functions. `join` adds the partial sums of all parts of the keys.
            `finish` divides the sums by the denominator of the softmax, and stores y.
        kernel, join_kernel: The signatures of the two kernels.
        finish_lines: Lines that complete the denominator of the softmax.
        finish_block, finish_joined: The two calls of `finish`. The kernel contains the first call, for a single part.
            `join` contains the second call.
        join_block, join_row: The calls of `join`.
        begin: The position of the first query of a text, as an expression.
        bounds: Lines that define the first and last token of a block of queries. Empty if the kernel reads neither
            token.
        queries: Lines that load a block of queries.
        shared: Whether the values are the first channels of the keys.
        reused: Whether the loaded keys also serve as values. Codes are instead loaded once as keys and once as values,
            because Triton does not prefetch a tile that is converted for two products.
        rest: Whether keys have additional channels after the channels that are also values.
        positions: Lines that define the variables of the score for a block of queries.
        new_token: Lines that attend to the new token, and write its key and value to the cache. Empty if another kernel
            writes the cache.
        tiles: Lines that count the tiles of keys to which a block of queries may attend.
        loops: The loops over tiles of keys.
        key_mask, value_mask: The masks of valid elements, for a tile of keys and for a tile of values.
        other: The value of elements that `key_mask` or `value_mask` excludes.
        decode: The conversion of loaded keys and values.
        weights: The weights of the values in the softmax, as an expression.
        unit: The reciprocal of the constant factor in the scales of values, as text. The kernel multiplies y by this
            number.
        inside: The condition that excludes the padding of channels, with a leading ` & `. Empty without padding.
        element, stored: The dtype of the operands of matrix products, and the dtype of y.
        sizes, launched_sizes: Lines that define sizes, in the generated function and in the launch function.
        prepared: Lines before the launch.
        most_parts: The largest useful number of parts of the keys, as an expression.
        chosen: Lines of the launch that choose one of two tiles. Empty if there is one tile.
        arguments, join_arguments: The arguments of the launches.
        options: The options of the launch.
        written: The names of the tensors that the custom op writes, as items of a tuple.
        custom_op, fake: The signatures of the custom op and of its fake implementation.
        registered: The name of the custom op.
        promise: The docstring of the custom op.
        outer: Lines of the generated function, which calls the custom op. Empty if the generated function is the custom
            op.
        pairing: The line that computes, for a rotated channel, the index of its pair and the other channel of the pair.
        largest: The largest number of e4m3.
        wanted: The input checks of the generated function.
    """

    op: GeneratedFunction
    how: str
    heads: int
    kv_heads: int
    channels: int
    values: int
    settings: tuple[str, ...]
    helpers: tuple[str, ...]
    pdl: bool
    finish: str
    join: str
    kernel: str
    join_kernel: str
    finish_lines: tuple[str, ...]
    finish_block: str
    finish_joined: str
    join_block: str
    join_row: str
    begin: str
    bounds: tuple[str, ...]
    queries: tuple[str, ...]
    shared: bool
    reused: bool
    rest: bool
    positions: tuple[str, ...]
    new_token: tuple[str, ...]
    tiles: tuple[str, ...]
    loops: tuple[Loop, ...]
    key_mask: str
    value_mask: str
    other: str
    decode: str
    weights: str
    unit: str
    inside: str
    element: str
    stored: str
    sizes: tuple[str, ...]
    launched_sizes: tuple[str, ...]
    prepared: tuple[str, ...]
    most_parts: str
    chosen: tuple[str, ...]
    arguments: str
    join_arguments: str
    wanted: tuple[str, ...]
    options: str
    written: str
    custom_op: str
    fake: str
    registered: str
    promise: str
    outer: tuple[str, ...] = ()
    pairing: str = ""
    largest: float = LARGEST


def op_of(site: Site) -> CachedBase:
    assert isinstance(site.node.op, CachedBase)
    return site.node.op


def inputs_of(site: Site) -> dict[str, TensorType]:
    """Returns the types of the site's inputs, by the names of the inputs in generated code."""
    op = op_of(site)
    names = (table_name(name) if name in op.tables else name for name in op.names)
    return dict(zip(names, site.inputs, strict=True))


def sizes_of(site: Site) -> tuple[int, int]:
    """Returns the number of channels of a key, and the number of channels of a value."""
    return number_of(site.inputs[0].width), number_of(site.node.type.width)


def page_of(site: Site) -> int:
    """Returns the number of positions per page. Returns 0 if the cache has no pages."""
    inputs = inputs_of(site)
    return number_of(inputs["k"].shape[1]) if "table" in inputs else 0
