"""Int8 matrix products by CUTLASS 3.x, with TMA, int8 wgmma and the warp-specialized pingpong schedule."""

from specc.compiler.kernels.gemm.evt import GemmTile
from specc.compiler.kernels.int8.cutlass import rendered
from specc.compiler.kernels.int8.gemm import int8_epilogue, int8_refusal
from specc.compiler.kernels.kernel import Kernel, Rendered, Site
from specc.compiler.ops.quantized import Int8Linear

DEEP, SHALLOW = 128, 64  # elements of the reduction dim per iteration: 128 or 64 bytes of int8 in shared memory
WIDE, NARROW = 128, 64
# Elements of the weight; up to this size, the sm80 kernel was faster on an H200, because it starts sooner
SMALL = 512 * 256
LEAF = {
    "evt": "Sm90EVT",
    "sum": "{{}, {static_cast<int32_t const*>(offset)}, {}}",
    "column": "{{static_cast<{element} const*>({name})}}",
    "tile": "{{static_cast<{element} const*>({name}), {element}(0), stride_y}}",
}


class GemmInt8Sm90(Kernel):
    """Accepts any number of rows. TMA reads zeros beyond the last row, and stores nothing there.

    Each call sets up barriers and TMA, which takes 1 to 3 us. Small products take less time than this setup, so the
    kernel ranks first only for large weights.
    """

    def rejects(self, site: Site) -> str | None:
        return int8_refusal(site)

    def rank(self, site: Site) -> int:
        epilogue = int8_epilogue(site)
        return 0 if epilogue.n * epilogue.k > SMALL else 2

    def render(self, site: Site) -> Rendered:
        epilogue = int8_epilogue(site)
        n, k = WIDE if epilogue.n % WIDE == 0 else NARROW, DEEP if epilogue.k >= DEEP else SHALLOW
        tile = GemmTile(64, n, k, (1, 1), "Pingpong")
        return rendered(site, "cutlass/gemm_int8_sm90.cu.jinja", tile, LEAF)


GEMM_INT8_SM90 = GemmInt8Sm90("gemm_int8_sm90", "cutlass", frozenset({"int8_mma", "wgmma", "tma"}), Int8Linear)
