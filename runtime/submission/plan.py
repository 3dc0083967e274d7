"""The constants of a submission. This module declares their types, and bundle.py generates their values."""

from collections.abc import Mapping, Sequence
from typing import Any

from specc.compiler.programs.programs import DerivedWeight, Parameter, Phase
from specc.compiler.quant.scheme import Scheme
from specc.compiler.spec.spec import QuantSpec
from specc.compiler.spec.train import BitsSpec, TrainSpec
from specc.runtime.optim.update_rule import UpdateRule

NAME: str
CODEC: int
TARGETS: tuple[str, ...]
WINDOW: int
UNSCORED: int  # the number of targets at the start of a window that are not scored
TRAIN: TrainSpec
EVAL: BitsSpec
PHASES: tuple[Phase, ...]
QUANT: QuantSpec  # the settings of `quant`, without rules and default
PARAMS: Mapping[str, Sequence[Parameter]]  # the parameters of each target
DERIVED: Mapping[str, Sequence[DerivedWeight]]  # the derived weights of each target
INITS: Mapping[str, tuple[str, float]]  # the initial distribution of each parameter, and its argument
REUSED: Sequence[str]  # the parameters for which calibration measures `Statistics.uses`
BASE: Mapping[str, Scheme]  # the scheme of each parameter before promotion or allocation
SCHEMES: Mapping[str, type[Scheme]]
RULES: Mapping[str, type[UpdateRule[Any]]]  # the update rules, by kind of optimizer
SPEC: str  # the spec as JSON, without the rules of `quant`
SPEC_DIGEST: str
CODE: bytes
# TOKENIZER: the name, the number of ids, the id that separates documents, whether it is lossless, and the digest.
# PIECES: one character per id, as the function `_piece_table` of bundle.py computes it. BOUNDARIES: the ids that are
# boundaries (see `PieceBytes`).
TOKENIZER: tuple[str, int, int | None, bool, str]
PIECES: str
BOUNDARIES: Sequence[int]
