"""The compilation targets and their features. Each target is a row of data. No other code of the compiler depends on
the name of a target."""

from specc.compiler.records import record


@record
class Target:
    """A device to compile for.

    Attributes:
        name: the name in specs, such as `sm90`.
        title: the description of the hardware.
        dtype: the dtype in which the model computes.
        features: the hardware features that kernels may require, such as `wgmma`.
        languages: the languages of the kernels that the target can run.
        shared_memory: the bytes of shared memory per thread block.
        arch: the compute capability for which Triton compiles. 0 on the CPU.
        nvcc: the architecture name for CUDA C++. Empty on the CPU.
        flops: peak dense operations per second in `dtype`. 0 if unknown.
        bandwidth: peak memory bandwidth in bytes per second. 0 if unknown.
        workspace: the bytes of the workspace that cuBLAS allocates for each thread and stream.
        machine: the machine with the rates `flops` and `bandwidth`. Plans compute lower bounds of times from these
            rates.
    """

    name: str
    title: str
    dtype: str
    features: frozenset[str]
    languages: tuple[str, ...]
    shared_memory: int = 0
    arch: int = 0
    nvcc: str = ""
    flops: float = 0.0
    bandwidth: float = 0.0
    machine: str = ""
    workspace: int = 0

    def floor_ms(self, flops: int, moved: int) -> float | None:
        """Returns the minimum time in ms for `flops` operations and `moved` bytes at peak rates, or None if unknown."""
        return 1e3 * max(flops / self.flops, moved / self.bandwidth) if self.flops else None


_AMPERE = frozenset({"gpu", "mma", "cp_async", "int8_mma"})
_ADA = _AMPERE | {"fp8_mma"}
_HOPPER = _ADA | {"tma"}
_GPU = ("torch", "triton", "cutlass", "cuda")

CPU = Target("cpu", "any CPU", "f32", frozenset(), ("torch",))
SM80 = Target(
    "sm80", "A100", "bf16", _AMPERE, _GPU, 166_912, 80, "sm_80", 312e12, 2.04e12, "A100, vendor figure", 8_519_680
)
SM86 = Target(
    "sm86", "RTX 30", "bf16", _AMPERE, _GPU, 101_376, 86, "sm_86", 71e12, 0.936e12, "RTX 3090, vendor figure", 8_519_680
)
SM89 = Target(
    "sm89",
    "RTX 40, L4",
    "bf16",
    _ADA,
    _GPU,
    101_376,
    89,
    "sm_89",
    165e12,
    1.008e12,
    "RTX 4090, vendor figure",
    8_519_680,
)
SM90 = Target(
    "sm90",
    "H100, H200",
    "bf16",
    _HOPPER | {"wgmma"},
    _GPU,
    232_448,
    90,
    "sm_90a",
    695e12,
    4.27e12,
    "H200, measured",
    32 << 20,
)
SM100 = Target(
    "sm100",
    "B200",
    "bf16",
    _HOPPER | {"tcgen05"},
    _GPU,
    232_448,
    100,
    "sm_100a",
    2250e12,
    8e12,
    "B200, vendor figure",
    32 << 20,
)
SM120 = Target(
    "sm120",
    "RTX 50",
    "bf16",
    _HOPPER,
    _GPU,
    101_376,
    120,
    "sm_120a",
    209e12,
    1.79e12,
    "RTX 5090, vendor figure",
    8_519_680,
)

TARGETS = {target.name: target for target in (CPU, SM80, SM86, SM89, SM90, SM100, SM120)}
