"""What each target can do. A target is a row of data; nothing else in the compiler knows its name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """`features` are what kernels ask for; `shared_memory` is in bytes a block; `dtype` is what the model computes in.

    `arch` is the number Triton compiles for and `nvcc` the architecture name for CUDA C++; both are empty on the CPU.
    """

    name: str
    title: str
    dtype: str
    features: frozenset[str]
    languages: tuple[str, ...]
    shared_memory: int = 0
    arch: int = 0
    nvcc: str = ""


_AMPERE = frozenset({"gpu", "mma", "cp_async", "int8_mma"})
_HOPPER = _AMPERE | {"tma", "fp8_mma"}
_GPU = ("torch", "triton", "cutlass", "cuda")

CPU = Target("cpu", "any CPU", "f32", frozenset(), ("torch",))
SM80 = Target("sm80", "A100", "bf16", _AMPERE, _GPU, 166_912, 80, "sm_80")
SM86 = Target("sm86", "RTX 30", "bf16", _AMPERE, _GPU, 101_376, 86, "sm_86")
SM89 = Target("sm89", "RTX 40, L4", "bf16", _AMPERE | {"fp8_mma"}, _GPU, 101_376, 89, "sm_89")
SM90 = Target("sm90", "H100, H200", "bf16", _HOPPER | {"wgmma"}, _GPU, 232_448, 90, "sm_90a")
SM100 = Target("sm100", "B200", "bf16", _HOPPER | {"tcgen05"}, _GPU, 232_448, 100, "sm_100a")
SM120 = Target("sm120", "RTX 50", "bf16", _HOPPER, _GPU, 101_376, 120, "sm_120a")

TARGETS = {target.name: target for target in (CPU, SM80, SM86, SM89, SM90, SM100, SM120)}
