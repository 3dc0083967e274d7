"""Attention over a key-value cache, and the position of each row in the cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from specc.compiler.expr.mask import Mask
from specc.compiler.ir.torch_call import Input, TorchCall
from specc.compiler.ir.types import Sizes, Tensor, Tensors, TensorType, TypeRuleError
from specc.compiler.ops.attention import ScoredBase
from specc.compiler.ops.caches.key_value_cache import CODES, LARGEST, coded_types, decoded, ring_positions
from specc.compiler.records import record


@record
class CachedBase(ScoredBase):
    """The base class of attention over a cache of keys and values, for q [B, T, H, C] at `positions`.

    `names` lists the inputs: q, k, v, the positions, the inputs of the subclass, the scales of k and v, and the
    additional inputs of `ScoreFields`. A ring buffer does not contain the input tokens yet, so the rows of these tokens
    are separate inputs. The methods of the base classes expect other inputs: decoded values in the order of the names
    in `leading`, then the additional inputs. `plain` returns these inputs.

    Attributes:
        values: The number of leading features of the key that form the value. If None, the values are an input.
        coded: Whether k and v are e4m3 codes, with scales f32 [..., G, 1].
        ring: The sizes (first, window) of a ring buffer. The ring buffer is read before the rows of the input tokens
            are written.
    """

    everywhere: ClassVar[bool] = True
    layout: ClassVar[str]  # the first word of kernel names
    values: int | None = None
    coded: bool = False
    ring: tuple[int, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        stored = ("k", "v") if self.values is None else ("k",)
        scales = tuple(f"{name}_scale" for name in stored) if self.coded else ()
        new = tuple(f"new_{name}" for name in (*stored, *scales)) if self.ring is not None else ()
        return "q", *stored, *self.leading[3:], *scales, *new, *self.further

    @property
    def arity(self) -> int:
        return len(self.names)

    @property
    def words(self) -> str:
        score = "" if self.causal else f", {self.description}"
        return f"attention over {self.over}{' of e4m3' if self.coded else ''}{score}"

    @property
    def over(self) -> str:
        """A description of the cache's layout."""
        raise TypeRuleError(f"{self.name} does not define `over`, the description of its cache layout")

    def symbol(self, inputs: Sequence[TensorType]) -> tuple[str, str]:
        q, k = inputs[:2]
        values = self.values or inputs[2].width
        size = f"h{q.shape[-2]}_g{k.shape[-2]}_c{q.width}{f'_v{values}' if values != q.width else ''}"
        return "_".join(filter(None, (self.layout, "attention", self.title, "e4m3" if self.coded else ""))), size

    def types(self, inputs: Sequence[TensorType]) -> dict[str, TensorType]:
        """Returns the types of the inputs by name. k and v have the types of decoded keys and values."""
        types = dict(zip(self.names, inputs, strict=True))
        for name in ("k", "v", "new_k", "new_v"):
            if not self.coded or name not in types:
                continue
            rows = replace(types[name], dtype=types["q"].dtype)
            if (types[name], types[f"{name}_scale"]) != coded_types(rows):
                raise TypeRuleError(
                    f"needs codes u8 [..., C] with scales f32 [..., 1], "
                    f"not {types[name]} with {types[f'{name}_scale']}",
                    (1,),
                )
            types[name] = rows
        for name in ("k", "v"):
            new = types.get(f"new_{name}")
            if new is not None and new != types[name].with_shape(*types["q"].shape[:2], *types[name].shape[2:]):
                raise TypeRuleError(
                    f"needs new rows that match q {types['q']} and the ring {types[name]}, not {new}",
                    (self.names.index(f"new_{name}"),),
                )
        if self.values is not None:
            k = types["k"]
            if not isinstance(k.width, int) or k.width < self.values:
                raise TypeRuleError(
                    f"needs keys of at least {self.values} features, which are the values, but the keys are {k}", (1,)
                )
            types["v"] = k.with_shape(*k.shape[:-1], self.values)
        return types

    def infer(self, inputs: Sequence[TensorType]) -> tuple[TensorType, ...]:
        types = self.types(inputs)
        return ScoredBase.infer(self, [types[name] for name in (*self.leading, *self.further)])

    def flops(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sizes) -> int:
        return ScoredBase.flops(self, list(self.types(inputs).values()), outputs, sizes)

    def plain(self, *inputs: Tensor) -> list[Tensor]:
        """Returns decoded inputs in the order of the names in `leading` and `further`. If the cache is a ring buffer,
        the rows of the input tokens are appended to the cached rows of k and v."""
        import torch

        given = dict(zip(self.names, inputs, strict=True))
        for name in ("k", "v", "new_k", "new_v"):
            if self.coded and name in given:
                given[name] = decoded(given[name], given[f"{name}_scale"]).to(given["q"].dtype)
        for name in ("k", "v"):
            if f"new_{name}" in given:
                given[name] = torch.cat((given[name], given[f"new_{name}"]), 1)
        if self.values is not None:
            given["v"] = given["k"][..., : self.values]
        return [given[name] for name in (*self.leading, *self.further)]

    def reference(self, *inputs: Tensor) -> Tensors:
        return ScoredBase.reference(self, *self.plain(*inputs))

    def call(self, inputs: Sequence[TensorType]) -> TorchCall:
        at = {name: Input(place) for place, name in enumerate(self.names)}
        given: dict[str, object] = dict(at)
        for name in ("k", "v", "new_k", "new_v"):
            if self.coded and name in at:
                dtype = TorchCall(".", (at["q"], "dtype"))
                given[name] = TorchCall("from_codes", (at[name], at[f"{name}_scale"], dtype))
        for name in ("k", "v"):
            if f"new_{name}" in given:
                given[name] = TorchCall("torch.cat", ((given[name], given[f"new_{name}"]), 1))
        if self.values is not None:
            given["v"] = TorchCall("[]", (given["k"], (..., slice(None, self.values))))
        return replace(self.plain_call(inputs), args=tuple(given[name] for name in (*self.leading, *self.further)))

    def plain_call(self, inputs: Sequence[TensorType]) -> TorchCall:
        """Returns the call of the generated function, which accepts decoded keys and values."""
        return self.attend_call(inputs)

    def ids_below(self, inputs: Sequence[TensorType]) -> int:
        return CODES

    def site_type(self, type: TensorType) -> TensorType:
        if type.shape[:2] == ("B", 1):
            return type.with_shape("B", "T", *type.shape[2:])
        return type.with_shape("T") if (type.shape, type.dtype) == ((1,), "i64") else type

    def belonging(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Makes valid test inputs from random inputs. The positions become positions at the end of the cache, and
        document starts become earlier positions. Half of the codes become negative."""
        given = dict(zip(self.names, inputs, strict=True))
        given |= self.placed(given)
        for name in self.names if self.coded else ():
            if name.endswith("_scale"):
                codes = given[name.removesuffix("_scale")] % CODES
                codes[..., ::2] |= 0x80
                scale = (given[name].abs() / LARGEST).bfloat16().to(given[name].dtype)
                given |= {name.removesuffix("_scale"): codes, name: scale}
        if "start" in given:
            given["start"] = (given["positions"] // 3).expand(given["start"].shape).contiguous()
        return list(given.values())

    def placed(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns test values by name: the query positions, and all inputs that depend on these positions. `given` are
        random inputs."""
        raise TypeRuleError(f"{self.name} does not define `placed`, the query positions of random inputs")


class SdpaCached(CachedBase):
    """Attention of q [B, T, H, C] at `positions` (i64[T]) over a key-value cache k, v [B, S, G, C].

    Without `ring`, row j of the cache is position j. Rows after a query's position are masked. With `ring` (first,
    window), k and v are ring buffers of first + window rows. The ring buffers do not contain the input tokens yet. The
    keys and values [B, T, G, C] of the input tokens are additional inputs.
    """

    name: ClassVar[str] = "sdpa_cached"
    leading: ClassVar[tuple[str, ...]] = ("q", "k", "v", "positions")
    layout: ClassVar[str] = "cached"

    @property
    def over(self) -> str:
        return "a cache" if self.ring is None else "a ring"

    def plain_call(self, inputs: Sequence[TensorType]) -> TorchCall:
        return TorchCall("attend_cached", ()) if self.causal else self.attend_call(inputs)

    def _places(self, scored: bool, mask: Mask, tables: str) -> dict[str, object]:
        keys, places = cached_places(self.ring)
        return {"eager": ("i = positions[:, None]", *self._eager(scored, tables)), "keys": keys, "places": places}

    def positions(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        _, k, _, positions = inputs[:4]
        return positions.unsqueeze(1), cached_positions(self.ring, k.shape[1], positions)

    def placed(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        import torch

        # With a ring, there are so many earlier tokens that every row of the ring holds a position.
        queries, rows = given["q"].shape[1], given["k"].shape[1]
        begin = rows - queries if self.ring is None else 2 * rows
        return {"positions": torch.arange(begin, begin + queries, device=given["q"].device)}

    def site_sizes(self, sizes: Sizes) -> Sizes:
        return {**sizes, "T": 1}


def cached_places(ring: tuple[int, int] | None) -> tuple[str, tuple[str, ...]]:
    """Returns a sentence about the keys of a cache, and Torch lines that compute the key positions `j`. The lines read
    k [B, heads, S, C] and the query `positions`."""
    if ring is None:
        keys = "Row j of the cache is position j. Rows behind a query are masked."
        return keys, ("j = torch.arange(k.shape[2], device=k.device)",)
    first, window = ring
    held = f"positions 0 to {first - 1} and the last {window} after them" if first else f"the last {window} positions"
    row = f"torch.where(row < {first}, row, last)" if first else "last"
    empty = f"(held >= begin) | (row >= {first}) & (last < {first})" if first else "held < 0"
    return f"k and v are the rows of a ring, which holds {held}, then those of the queries.", (
        "row, begin = torch.arange(k.shape[2] - len(positions), device=k.device), positions[0]",
        f"last = begin - 1 - (begin - 1 - row) % {window}  # the position in each row of the window",
        f"held = {row}",
        f"empty = {empty}",
        "j = torch.cat((torch.where(empty, positions[-1] + 1, held), positions))",
    )


def cached_positions(ring: tuple[int, int] | None, rows: int, positions: Tensor) -> Tensor:
    """Returns the positions of the keys of a cache, i64[S]. Empty rows of a ring buffer have a position after all
    tokens.

    Args:
        ring: The sizes (first, window) of a ring buffer, whose rows precede the rows of the input tokens. None for
            other caches.
        rows: The number S of keys.
        positions: The positions of the queries, i64[T].
    """
    import torch

    if ring is None:
        return torch.arange(rows, device=positions.device)
    return torch.cat((ring_positions(*ring, int(positions[0])), positions.cpu())).to(positions.device)
