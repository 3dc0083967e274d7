"""Parameters as they will be stored, for a model that learns to live with it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from specc.compiler.quant.scheme import Scheme


class Rounded:
    """Writes the masters into the model's parameters, each rounded to the grid of its scheme; what `shares` names, f32
    [K] for a weight [N, K], as this number times them is rounded.

    Attributes:
        schemes: as given; those without a grid (floats) are left alone.
        names: the parameters that are rounded.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        shown: Mapping[str, Tensor],
        schemes: Mapping[str, Scheme],
        shares: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.schemes = schemes
        self.names = frozenset(name for name, scheme in schemes.items() if scheme.has_grid)
        if own := sorted(name for name in self.names if masters[name] is shown[name]):
            raise ValueError(f"{own[0]} is its own master: there is nothing to round it into")
        # By scheme and shape, so that one of each has its few kernels and not each parameter.
        shares = shares or {}
        alike: dict[tuple[Scheme, torch.Size, bool], list[str]] = {}
        for name in masters:
            if name in self.names:
                alike.setdefault((_without_match(schemes[name]), masters[name].shape, name in shares), []).append(name)
        self._alike = [
            (
                scheme,
                [masters[name].detach() for name in names],
                [shown[name].detach() for name in names],
                torch.stack([shares[name] for name in names])[:, None] if shared else None,
            )
            for (scheme, _, shared), names in alike.items()
        ]

    @torch.no_grad()
    def write(self) -> None:
        """Rounds all of them, without waiting for a GPU."""
        for scheme, masters, shown, shares in self._alike:
            if shares is None:
                torch._foreach_copy_(shown, list(scheme.on_grid(torch.stack(masters))))
            else:
                torch._foreach_copy_(shown, list(scheme.on_grid(torch.stack(masters) * shares) / shares))


def _without_match(scheme: Scheme) -> Scheme:
    """The scheme of a rule as it compares equal to that of another rule that says the same."""
    return scheme.model_copy(update={"match": ""}) if "match" in type(scheme).model_fields else scheme
