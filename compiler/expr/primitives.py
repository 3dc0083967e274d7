"""The functions of the pointwise language. Each is one entry of PRIMITIVES, and a new function needs only a new entry.

Functions of positions and heads are in positional.py. Only masks and scores of attention may call these functions.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, field

from ..records import record


@record
class Function:
    """The name of a function and the number of its arguments.

    Attributes:
        example: a call with the right number of arguments, for error messages.
    """

    example: str

    @property
    def name(self) -> str:
        return self.example.partition("(")[0]

    @property
    def arity(self) -> int:
        return self.example.count(",") + 1


@record
class Primitive(Function):
    """A function of the language.

    `derivative`, `definition`, `triton`, `cuda` and `cute` may be expressions of the language in `x`, the first
    argument, and `s`, the second. If a function has a `derivative`, the arguments after the first are constants.

    Attributes:
        cost: The approximate number of instructions per element.
        value: The function on floats. `value` raises ArithmeticError or ValueError for arguments at which the function
            is undefined.
        derivative: The derivative with respect to `x`, with Torch's subgradient at a kink. Empty for min, max and
            where, for which `derive` has separate rules.
        torch: The Torch function, in the module `torch` or `F` (torch.nn.functional).
        torch_keywords: The keyword arguments of the Torch function.
        sign: The sign of the values, ">= 0" or "> 0" (except for underflow). Empty if the sign varies.
        definition: An equivalent expression of other functions, for languages that lack the function.
        triton: The source text of a call on fp32 tensors, with {} for each argument, or an expression. The default is
            `definition`. The call must preserve NaN.
        cuda: The same as `triton`, for CUDA C++ on floats.
        cute: The same as `triton`, for the CuTe DSL on fp32 vectors.
        cuda_helpers: The source text of the device functions that `cuda` calls, by name. Functions come before their
            callers.
    """

    cost: int
    value: Callable[..., float]
    derivative: str
    torch: str
    _: KW_ONLY
    torch_keywords: Mapping[str, object] = field(default_factory=dict)
    sign: str = ""
    definition: str = ""
    triton: str = ""
    cuda: str = ""
    cute: str = ""
    cuda_helpers: Mapping[str, str] = field(default_factory=dict)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


# Definitions share subexpressions with derivatives. A kernel that needs the value and the derivative computes such a
# subexpression once. The helpers of CUDA C++ have no branches, so that the compiler interleaves the instructions of
# many elements. A division that is correctly rounded would have a branch. __expf is within 2 + |x| ulp of f32 and
# quick_erf within 5e-7: far below the rounding of stored values.
PRIMITIVES = {
    primitive.name: primitive
    for primitive in (
        Primitive(
            "relu(x)", 1, lambda x: max(x, 0.0), "where(x > 0, 1, 0)", "F.relu", sign=">= 0",
            definition="where(x < 0, 0, x)",  # the condition is false for NaN, so that NaN is returned
        ),
        Primitive(
            "leaky_relu(x, 0.01)", 2, lambda x, s: x if x > 0 else s * x, "where(x > 0, 1, s)", "F.leaky_relu",
            definition="where(x > 0, x, s * x)",
        ),
        Primitive(
            "gelu(x)", 15, lambda x: 0.5 * x * (1 + math.erf(x * math.sqrt(0.5))),
            "0.5 * (1 + erf(0.7071067811865476 * x)) + 0.3989422804014327 * x * exp(-0.5 * x ** 2)", "F.gelu",
            triton="0.5 * x * (1 + erf(0.7071067811865476 * x))",
            cuda="x * (0.5 + 0.5 * erf(0.7071067811865476 * x))",
            cute="0.5 * x * (1 + erf(0.7071067811865476 * x))",
        ),
        # 0.5 (1 + tanh(z)) is sigmoid(2 z), and 1.5957... is 2 sqrt(2 / pi)
        Primitive(
            "gelu_tanh(x)", 14, _gelu_tanh,
            "sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x ** 2))"
            " * (1 + 1.5957691216057308 * x * (1 + 0.134145 * x ** 2)"
            " * sigmoid(-1.5957691216057308 * x * (1 + 0.044715 * x ** 2)))",
            "F.gelu", torch_keywords={"approximate": "tanh"},
            definition="x * sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x ** 2))",
        ),
        Primitive(
            "silu(x)", 9, lambda x: x * _sigmoid(x), "sigmoid(x) * (1 + x * (1 - sigmoid(x)))", "F.silu",
            definition="x * sigmoid(x)",
        ),
        Primitive(
            "tanh(x)", 8, math.tanh, "1 - tanh(x) ** 2", "torch.tanh",
            triton="2 * sigmoid(2 * x) - 1", cuda="tanhf({})", cute="cute.math.tanh({}, fastmath=True)",
        ),
        Primitive(
            "cos(x)", 4, math.cos, "-sin(x)", "torch.cos",
            triton="tl.cos({})", cuda="cosf({})", cute="cute.math.cos({})",
        ),
        Primitive(
            "sin(x)", 4, math.sin, "cos(x)", "torch.sin",
            triton="tl.sin({})", cuda="sinf({})", cute="cute.math.sin({})",
        ),
        Primitive(
            "log(x)", 4, math.log, "1 / x", "torch.log",
            triton="tl.log({})", cuda="logf({})", cute="cute.math.log({})",
        ),
        Primitive(
            "sqrt(x)", 4, math.sqrt, "0.5 / sqrt(x)", "torch.sqrt", sign=">= 0",
            triton="tl.sqrt({})", cuda="sqrtf({})", cute="cute.math.sqrt({})",
        ),
        Primitive(
            "abs(x)", 1, abs, "where(x > 0, 1, where(x < 0, -1, 0))", "torch.abs", sign=">= 0",
            triton="tl.abs({})", cuda="fabsf({})", cute="where(x < 0, -x, x)",
        ),
        Primitive(
            "max(a, b)", 1, max, "", "torch.maximum", cuda="larger({}, {})", cute="larger({}, {})",
            # By default, tl.minimum and tl.maximum drop a NaN operand
            triton="tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
            cuda_helpers={"larger": """\
// The larger of two numbers, NaN where one is; fmaxf would drop it.
__device__ inline float larger(float a, float b) { return a < b || b != b ? b : a; }"""},
        ),
        Primitive(
            "min(a, b)", 1, min, "", "torch.minimum", cuda="smaller({}, {})", cute="smaller({}, {})",
            triton="tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
            cuda_helpers={"smaller": """\
// The smaller of two numbers, NaN where one is.
__device__ inline float smaller(float a, float b) { return a > b || b != b ? b : a; }"""},
        ),
        # In CUDA C++, `where` becomes the operator ?:, which the printer parenthesizes.
        Primitive(
            "where(x > 0, a, b)", 1, lambda condition, a, b: a if condition else b, "", "torch.where",
            triton="tl.where({}, {}, {})", cute="cute.where({}, {}, {})",
        ),
        Primitive(
            "sigmoid(x)", 8, _sigmoid, "sigmoid(x) * (1 - sigmoid(x))", "torch.sigmoid", sign="> 0",
            triton="tl.sigmoid({})", cuda="quick_sigmoid({})", cute="1 / (1 + exp(-x))",
            cuda_helpers={"quick_sigmoid": """\
// 1 / (1 + exp(-x)) within 4 ulp, without the branch of an exactly rounded division.
__device__ inline float quick_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }"""},
        ),
        # quick_bell and quick_erf have the argument s = 1.2011224 z, because exp2f is one instruction. The value and
        # the slope of gelu use the same s, so that the compiler shares one erf and one exp between them.
        Primitive(
            "exp(x)", 4, math.exp, "exp(x)", "torch.exp", sign="> 0", triton="tl.exp({})", cuda="__expf({})",
            cute="cute.math.exp({}, fastmath=True)",
            cuda_helpers={"quick_bell": """\
// exp(-z * z) of s = 1.2011224 z.
__device__ inline float quick_bell(float s) { return exp2f(-s * s); }"""},
        ),
        Primitive(
            "exp2(x)", 4, lambda x: 2.0**x, "0.6931471805599453 * exp2(x)", "torch.exp2", sign="> 0",
            triton="tl.exp2({})", cuda="exp2f({})", cute="cute.math.exp2({}, fastmath=True)",
        ),
        Primitive(
            "erf(x)", 12, math.erf, "1.1283791670955126 * exp(-(x ** 2))", "torch.erf",
            triton="tl.erf({})", cuda="quick_erf({})", cute="cute.math.erf({})",
            cuda_helpers={"quick_erf": """\
// erf(z) of s = 1.2011224 z, within 5e-7 (Abramowitz and Stegun, section 7.1); erff takes far more
// registers.
__device__ inline float quick_erf(float s) {
  float const t = __fdividef(1.0f, 1.0f + 0.272737481f * fabsf(s));
  float const high = -0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f));
  return copysignf(1.0f - t * (0.254829592f + t * high) * quick_bell(s), s);
}"""},
        ),
    )
}  # fmt: skip
