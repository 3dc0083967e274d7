"""Runs generated files that call a library's attention on the CPU. Torch stands for the kernels of flash-attn-4 and for
the CuTe DSL, FlexAttention is not compiled, and Triton's interpreter stands for the GPU.

`python run_flash.py FOLDER RUNS RESULTS`, where RUNS are (module, function, inputs)."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

GRID = tuple[Tensor, Tensor, Tensor, Tensor]


class Vector(torch.Tensor):
    """All elements of a vector at once: element 0 stands for each of them."""

    def __getitem__(self, index: Any) -> Tensor:
        return self


def full_like(like: Tensor, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    value = value if isinstance(value, Tensor) else torch.full(like.shape, value)
    return value.to(dtype or like.dtype).expand(like.shape).as_subclass(Vector)


def grid_of(q: Tensor, k: Tensor) -> GRID:
    """b, h, i and j of all pairs [B, H, T, T]."""
    axes = (torch.arange(n, dtype=torch.int32) for n in (len(q), q.shape[2], q.shape[1], k.shape[1]))
    b, h, i, j = (axis.as_subclass(Vector) for axis in torch.meshgrid(*axes, indexing="ij"))
    return b, h, i, j


def seen_of(grid: GRID, causal: bool, mask: Any, blocks: Any, aux: Any, by_keys: bool) -> Tensor:
    """The pairs that the lists of blocks and the mask leave."""
    b, _, i, j = grid
    if mask is None:
        assert causal and blocks is None
        return j <= i
    queries, keys = blocks.block_size
    row, column = (j // keys, i // queries) if by_keys else (i // queries, j // keys)
    rows, columns = int(row.max()) + 1, int(column.max()) + 1
    seen = torch.zeros(i.shape, dtype=torch.bool)
    listed = torch.zeros(len(b), rows, columns, dtype=torch.int64)
    for counts, order, full in ((blocks[0], blocks[1], False), (blocks[2], blocks[3], True)):
        assert counts.shape[1:] == (1, rows) and order.shape[1:] == (1, rows, columns)
        chosen = torch.zeros(len(b), rows, columns, dtype=torch.int64)
        for n in range(len(b)):
            for r in range(rows):
                some = order[n % len(order), 0, r, : counts[n % len(counts), 0, r]].long()
                assert (some.diff() > 0).all()
                chosen[n, r, some] = 1
        listed += chosen
        there = chosen[b.long(), row.long(), column.long()].bool()
        seen |= there if full else there & mask(b, grid[1], i, j, None, aux)
        if full:  # a block that exceeds the sequence needs its mask
            assert not chosen[:, :, i.shape[2] // keys if not by_keys else i.shape[2] // queries :].any()
    assert listed.max() <= 1
    return seen


def scores_of(q: Tensor, k: Tensor, words: dict[str, Any], by_keys: bool) -> tuple[GRID, Tensor, Tensor, Tensor]:
    grid, shared = grid_of(q, k), q.shape[2] // k.shape[2]
    scale = words.get("softmax_scale") or q.shape[-1] ** -0.5
    s = torch.einsum("bihc,bjhc->bhij", q, k.repeat_interleave(shared, 2)) * scale
    aux = words.get("aux_tensors")
    x = s
    if "score_mod" in words:
        b, h, i, j = grid
        places = {"q_idx": i, "kv_idx": j, "seqlen_info": None, "aux_tensors": aux}
        x = words["score_mod"](s.as_subclass(Vector), b, h, **places).as_subclass(Tensor)
    blocks = words.get("block_sparse_tensors")
    seen = seen_of(grid, words.get("causal", False), words.get("mask_mod"), blocks, aux, by_keys)
    return grid, s, x, seen.as_subclass(Tensor)


def forward(q: Tensor, k: Tensor, v: Tensor, **words: Any) -> tuple[Tensor, ...]:
    assert words["return_lse"]
    shape = q.shape
    q, k, v = (value.float() for value in (q, k, v))
    _, _, x, seen = scores_of(q, k, words, False)
    x = x.masked_fill(~seen, -torch.inf)
    sinks = words.get("learnable_sink")
    column = [] if sinks is None else [sinks[:, None, None].expand(*x.shape[:3], 1)]
    lse = torch.cat((x, *column), -1).logsumexp(-1)
    p = (x - lse[..., None]).exp().nan_to_num(0.0)
    y = torch.einsum("bhij,bjhc->bihc", p, v.repeat_interleave(shape[2] // k.shape[2], 2))
    return y, lse, None, None, None


def backward(q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, lse: Tensor, **words: Any) -> tuple[Tensor, ...]:
    q, k, v, y, dy = (value.float() for value in (q, k, v, y, dy))
    shared = q.shape[2] // k.shape[2]
    (b, h, i, j), s, x, seen = scores_of(q, k, words, True)
    p = torch.where(seen, (x - lse[..., None]).exp(), 0.0)
    delta = (dy * y).sum(-1).transpose(1, 2)
    dx = p * (torch.einsum("bihc,bjhc->bhij", dy, v.repeat_interleave(shared, 2)) - delta[..., None])
    ds = dx
    if "score_mod_bwd" in words:
        places = {"q_idx": i, "kv_idx": j, "seqlen_info": None, "aux_tensors": words.get("aux_tensors")}
        ds = words["score_mod_bwd"](dx.as_subclass(Vector), s.as_subclass(Vector), b, h, **places).as_subclass(Tensor)
    ds = ds * (words.get("softmax_scale") or q.shape[-1] ** -0.5)
    dq = torch.einsum("bhij,bjhc->bihc", ds, k.repeat_interleave(shared, 2))
    dk, dv = (torch.einsum("bhij,bihc->bjhc", *pair).unflatten(2, (-1, shared)).sum(3) for pair in ((ds, q), (p, dy)))
    sinks = words.get("learnable_sink")
    return dq, dk, dv, *(() if sinks is None else (-((sinks[:, None] - lse).exp() * delta).sum((0, 2)),))


class Blocks(tuple[Any, ...]):
    """Four tensors and the size of a block."""

    block_size: tuple[int, int]

    def __new__(cls, *tensors: Tensor, block_size: tuple[int, int]) -> "Blocks":
        self = super().__new__(cls, tensors)
        self.block_size = block_size
        return self


def stand_in() -> None:
    """Adds modules with the names of flash-attn-4 and of the CuTe DSL."""
    functions = ("tanh", "exp", "exp2", "log", "log2", "sqrt", "erf", "cos", "sin")
    math = {name: lambda x, fastmath=False, name=name: getattr(torch, name)(x) for name in functions}
    cute = SimpleNamespace(jit=lambda f: f, where=torch.where, full_like=full_like, math=SimpleNamespace(**math))
    modules = {name: ModuleType(name) for name in ("cutlass", "flash_attn", "flash_attn.cute")}
    modules["cutlass"].__dict__.update(cute=cute, Float32=torch.float32, Int32=torch.int32)
    interface, sparsity = ModuleType("flash_attn.cute.interface"), ModuleType("flash_attn.cute.block_sparsity")
    interface.__dict__.update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    sparsity.__dict__.update(BlockSparseTensorsTorch=Blocks)
    for module in (*modules.values(), interface, sparsity):
        sys.modules[module.__name__] = module


def main() -> None:
    folder, runs, results = map(Path, sys.argv[1:])
    stand_in()
    flex_attention._validate_device = lambda *_: None  # gradients on the CPU are refused, but right without a compiler
    compiled = torch.compile
    torch.compile = lambda *function, **words: compiled(*function, **(words | {"backend": "eager"}))
    sys.path.insert(0, str(folder))
    outputs = []
    for module, function, inputs in torch.load(runs):
        path = folder / Path(*module.split(".")).with_suffix(".py")
        path.write_text(path.read_text().replace("not tensor.is_cuda or ", ""))  # this machine has no GPU
        loaded = importlib.import_module(module)
        outputs.append([x.as_subclass(Tensor) for x in getattr(loaded, function)(*inputs)])
    torch.save(outputs, results)


if __name__ == "__main__":
    main()
