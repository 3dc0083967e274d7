"""The pointwise expression language: parsing, simplification, differentiation, plans for the backward pass, and
translation to source text in Torch, Triton, CUDA C++ or the CuTe DSL."""

from .algebra import key
from .backward import KEEPS, Backward, Keep, plan_backward
from .derive import derive, homogeneous_degree
from .evaluate import number, torch_value
from .name import name_of
from .parse import parse, reread
from .primitives import PRIMITIVES
from .simplify import simplify
from .spell import cuda_functions, cuda_text, cute_text, decided, score_text, torch_text, triton_text
from .traverse import substitute, variables
from .values import Binary, Call, Compare, Const, Expr, ExprError, Neg, Var

__all__ = [
    "KEEPS",
    "PRIMITIVES",
    "Backward",
    "Binary",
    "Call",
    "Compare",
    "Const",
    "Expr",
    "ExprError",
    "Keep",
    "Neg",
    "Var",
    "cuda_functions",
    "cuda_text",
    "cute_text",
    "decided",
    "derive",
    "homogeneous_degree",
    "key",
    "name_of",
    "number",
    "parse",
    "plan_backward",
    "reread",
    "score_text",
    "simplify",
    "substitute",
    "torch_text",
    "torch_value",
    "triton_text",
    "variables",
]
