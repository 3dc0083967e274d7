"""What a submission knows of its model. Its values are written by bundle.py; here they have types only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specc.compiler.programs.programs import Parameter, Phase
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import QuantSpec
from specc.compiler.spec.train import BitsSpec, TrainSpec
from specc.runtime.optim.update_rule import UpdateRule

NAME: str
CODEC: int
TARGETS: tuple[str, ...]
WINDOW: int
TRAIN: TrainSpec
EVAL: BitsSpec
PHASES: tuple[Phase, ...]
QUANT: QuantSpec  # without its rules
PARAMS: Mapping[str, Sequence[Parameter]]  # by target
INITS: Mapping[str, tuple[str, float]]  # a parameter's way to start, and the number that belongs to it
BASE: Mapping[str, Scheme]  # a scheme a parameter, before any promotion
SCHEMES: Mapping[str, type[Scheme]]
RULES: Mapping[str, type[UpdateRule[Any]]]  # by kind of optimizer
SPEC: str  # JSON, resolved for BASE
SPEC_DIGEST: str
CODE: bytes
# Of the tokenizer: name, ids, id of the separator, lossless, digest; bytes of each id without a leading space, which
# ids have one, and which are boundaries.
TOKENIZER: tuple[str, int, int | None, bool, str]
BYTES: Sequence[int]
SPACES: Sequence[int]
BOUNDARIES: Sequence[int]
