"""Fake quantization of parameters, for quantization-aware training."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specc.compiler.quant.scheme import Scheme


class FakeQuantized:
    """Writes quantized master weights to the parameters of the model.

    Args:
        masters: the f32 master weights, by name.
        parameters: the parameters of the model, by name.
        schemes: the storage scheme of each parameter, by name. Parameters that are stored as floats are not rounded.
        input_shares: factors of the input features, f32 [K] for a weight [N, K], by the name of the weight. The weight
            is multiplied by its factors before rounding, and divided by the same factors after rounding.

    Attributes:
        schemes: the argument `schemes`.
        names: the names of the parameters that are rounded.

    Raises:
        ValueError: if a parameter to round shares its tensor with its master.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        schemes: Mapping[str, Scheme],
        input_shares: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.schemes = schemes
        self.names = frozenset(name for name, scheme in schemes.items() if scheme.has_grid)
        if same := sorted(name for name in self.names if masters[name] is parameters[name]):
            raise ValueError(f"{same[0]} is the same tensor as its master, so it cannot be rounded")
        # Parameters are grouped by scheme and shape, so that one kernel launch processes a whole group.
        shares = input_shares or {}
        groups: dict[tuple[Scheme, torch.Size, bool], list[str]] = {}
        for name in masters:
            if name in self.names:
                group = _without_match(schemes[name]), masters[name].shape, name in shares
                groups.setdefault(group, []).append(name)
        self._groups = [
            (
                scheme,
                [masters[name].detach() for name in names],
                [parameters[name].detach() for name in names],
                torch.stack([shares[name] for name in names])[:, None] if has_shares else None,
            )
            for (scheme, _, has_shares), names in groups.items()
        ]

    @torch.no_grad()
    def write(self) -> None:
        for scheme, masters, parameters, shares in self._groups:
            if shares is None:
                torch._foreach_copy_(parameters, list(scheme.on_grid(torch.stack(masters))))
            else:
                torch._foreach_copy_(parameters, list(scheme.on_grid(torch.stack(masters) * shares) / shares))


def _without_match(scheme: Scheme) -> Scheme:
    return scheme.model_copy(update={"match": ""}) if "match" in type(scheme).model_fields else scheme
