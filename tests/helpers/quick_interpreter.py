"""Triton's interpreter without work that it repeats. The results are the same.

Triton replaces the functions of `triton.language` again at each call of a device function, and restores them after each
launch: in a process that only interprets kernels, once is enough. Every tensor computes the constants of its shape, and
looks up the dtype of NumPy in a table that is made anew: both are stored here for each shape and dtype.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import quick_torch
import triton.language as tl
from triton.runtime import interpreter

Shape = tuple[int, ...]
replace, find_dtype = interpreter._patch_lang, interpreter._get_np_dtype
init_tensor, init_block = tl.tensor.__init__, tl.block_type.__init__
replaced = set[tuple[bool, ...]]()
dtypes = dict[str, np.dtype[Any]]()
shapes = dict[Shape, tuple[Any, Any]]()  # what a tensor of a shape stores
blocks = dict[tuple[str, Shape], tuple[Any, int, str]]()  # what a type of a block stores


def replace_once(fn: Any) -> SimpleNamespace:
    visible = fn.__globals__.values()
    key = tuple(any(value is language for value in visible) for language in (tl, tl.core))
    if key not in replaced:
        replaced.add(key)
        replace(fn)
    return SimpleNamespace(restore=lambda: None)


def dtype_of(type: tl.dtype) -> np.dtype[Any]:
    if type.name not in dtypes:
        dtypes[type.name] = find_dtype(type)
    return dtypes[type.name]


def new_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    key = tuple(type.shape.values) if type.is_block() else ()
    if key not in shapes:
        init_tensor(self, handle, type)
        shapes[key] = self.shape, self.numel
    self.shape, self.numel = shapes[key]
    self.handle, self.type, self.dtype = handle, type, type.scalar


def new_block(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    key = element_ty.name, tuple([tl.core._unwrap_if_constexpr(size) for size in shape])
    if key not in blocks:
        init_block(self, element_ty, shape)
        blocks[key] = self.shape, self.numel, self.name
    self.shape, self.numel, self.name = blocks[key]
    self.element_ty = element_ty


def quicken() -> None:
    quick_torch.quicken()
    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, dtype_of
    tl.tensor.__init__, tl.block_type.__init__ = new_tensor, new_block
