"""The memory layout of integer weights for kernels with few input rows.

A code is an integer of 2 to 8 bits. The layout stores a code plus 2^(bits - 1), which is unsigned. The bits are divided
into parts of 8, 4, 2 or 1 bits. The widths of the parts are the distinct powers of two that add up to the number of
bits. For example, 5 bits become the lower 4 bits and the highest bit.

A row of K codes, padded to a multiple of 128, has L = K / 8 lanes. Lane i holds the codes of the features i, i + L,
..., i + 7 L. A row stores the widest part of all lanes, then the next part of all lanes, and so on. For a part of W
bits, a lane has one word of 8 W bits. Code j occupies W bits of the word, from bit j W on.
"""

from collections.abc import Iterator

from specc.compiler.ir.types import Tensor

CODES = 8  # codes per lane
ALIGNMENT = 16  # lanes per row are a multiple of this number, so that each part of a row is aligned to 16 bytes
STORAGE = "packed"  # marks the buffers of codes and scales


def lanes_of(features: int) -> int:
    """Returns the number of lanes in a row of `features` codes. A lane holds 8 codes, in one byte per bit of a code."""
    return -(-features // (CODES * ALIGNMENT)) * ALIGNMENT


def parts_of(bits: int) -> Iterator[tuple[int, int]]:
    """Yields each part of a code: the width, and the position of the lowest bit."""
    below = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, below
            below += width


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes.

    Args:
        codes: the codes i8 [N, K], from -2^(bits - 1) to 2^(bits - 1) - 1.
        bits: the number of bits of a code, 2 to 8.

    Returns:
        The packed codes, u8 [N, bits * lanes].

    Raises:
        ValueError: if the number of bits or a code is out of range.
    """
    import torch

    half = 1 << (bits - 1)
    if not 2 <= bits <= 8 or (codes.numel() and not -half <= int(codes.min()) <= int(codes.max()) < half):
        raise ValueError(f"codes of {bits} bits: there must be 2 to 8 bits, and codes from {-half} to {half - 1}")
    lanes = lanes_of(codes.shape[1])
    padded = torch.nn.functional.pad(codes, (0, CODES * lanes - codes.shape[1])).view(-1, CODES, lanes)
    parts: list[Tensor] = []
    for width, below in parts_of(bits):
        word = codes.new_zeros(len(codes), lanes, dtype=torch.int64)
        for j in range(CODES):
            word |= ((padded[:, j].long() + half) >> below & (1 << width) - 1) << width * j
        parts.append(torch.stack([word >> 8 * i & 255 for i in range(width)], 2).to(torch.uint8).flatten(1))
    return torch.cat(parts, 1)


def unpack(packed: Tensor, features: int) -> Tensor:
    """Inverts `pack`. Returns the codes, i8 [N, features]."""
    import torch

    lanes = lanes_of(features)
    bits = packed.shape[1] // lanes
    codes = packed.new_full((len(packed), CODES, lanes), -(1 << (bits - 1)), dtype=torch.int16)
    for width, below in parts_of(bits):
        octets = packed[:, below * lanes : (below + width) * lanes].reshape(-1, lanes, width).long()
        word = sum((octets[:, :, i] << 8 * i for i in range(width)), start=torch.zeros_like(octets[:, :, 0]))
        for j in range(CODES):
            codes[:, j] += ((word >> width * j & (1 << width) - 1) << below).to(torch.int16)
    return codes.flatten(1)[:, :features].to(torch.int8)


def dequantized(packed: Tensor, scale: Tensor, features: int) -> Tensor:
    """Returns the weight [N, features], code times scale. The dtype is f32, or the dtype of `scale` [N] if `scale` is
    wider."""
    import torch

    dtype = torch.promote_types(scale.dtype, torch.float32)
    return unpack(packed, features).to(dtype) * scale.to(dtype)[:, None]
