"""The lookup of the update rule of each kind of optimizer."""

from collections.abc import Mapping
from typing import Any

from specc.compiler.catalog import classes
from specc.compiler.spec.optimizers.optimizer import OptimizerSpec
from specc.runtime import optim
from specc.runtime.optim.update_rule import UpdateRule


def rule_of(spec: OptimizerSpec) -> type[UpdateRule[Any]]:
    """Returns the update rule whose name is the kind of the spec."""
    rules: Mapping[str, type[UpdateRule[Any]]] = classes(optim, UpdateRule)
    return rules[spec.kind]
