"""Int8 matrix products by CUTLASS 2.x with mma.sync and cp.async, for sm80 and later GPUs."""

from typing import ClassVar

from specc.compiler.kernels.int8.cutlass import rendered
from specc.compiler.kernels.int8.gemm import int8_epilogue, int8_refusal
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.quantized import Int8Linear
from specc.compiler.records import record


@record
class MmaTile:
    """The tile of a thread block has `m` x `n` outputs, and the tile of a warp has `warp_m` x `warp_n`. An iteration
    covers `k` elements of the reduction dim, with `stages` loads in flight."""

    m: int
    n: int
    k: int
    warp_m: int
    warp_n: int
    stages: int

    def __str__(self) -> str:
        warps = f"{self.m // self.warp_m}x{self.n // self.warp_n} warps"
        return f"{self.m}x{self.n}x{self.k}, {warps}, {self.stages} stages"


NARROW = MmaTile(64, 32, 64, 32, 16, 4)
SQUARE = MmaTile(64, 64, 64, 32, 32, 4)
LEAF = {
    "evt": "Sm80EVT",
    "sum": "{{}, {static_cast<int32_t const*>(offset), 0, {}}, {}}",
    "column": "{{static_cast<{element} const*>({name}), {element}(0), {{}}}}",
    "tile": "{{static_cast<{element}*>(const_cast<void*>({name})), {element}(0), stride_y}}",
}


class GemmInt8Sm80(Kernel):
    """Accepts any number of rows. The kernel skips the rows of a tile beyond the last row of the tensor."""

    RANK: ClassVar[int] = 1

    def rejects(self, site: Site) -> str | None:
        return int8_refusal(site)

    def render(self, site: Site) -> Rendered:
        epilogue = int8_epilogue(site)
        # A thread stores 8 columns at a time, and the rows of a narrow tile are too short for such stores
        wide = epilogue.y.type.dtype == "f32"
        tile = NARROW if wide and epilogue.n <= NARROW.n else SQUARE
        return rendered(site, "cutlass/gemm_int8_sm80.cu.jinja", tile, LEAF)


GEMM_INT8_SM80 = GemmInt8Sm80("gemm_int8_sm80", "cutlass", frozenset({"int8_mma", "cp_async"}), Int8Linear)
