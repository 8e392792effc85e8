"""Whether act-orders are orders: a kernel reads activations where they point."""

from collections.abc import Mapping

import torch

from w4pack.convert.errors import SourceError, name_some


def is_order(perm: torch.Tensor) -> torch.Tensor:
    """Return, on its device, whether an act-order has every number once; of a stack, whether all have."""
    natural = torch.arange(perm.shape[-1], dtype=perm.dtype, device=perm.device)
    return (perm.sort(-1).values == natural).all()


def check(perms: Mapping[str, torch.Tensor]) -> None:
    """Check act-orders on their device. Expert stacks have the order in the last dimension.

    Raises:
        SourceError: an ``act_perm`` that is no permutation of the layer's inputs; names all of them.
    """
    right = {name: is_order(perm) for name, perm in perms.items()}
    wrong = [name for name, flag in right.items() if not bool(flag)]  # the first look waits for all of them
    if wrong:
        raise SourceError(
            "an act-order is no permutation",
            code="act-perm",
            where=name_some(wrong),
            expected="every number from 0 to K - 1 once",
            hint="w4pack verify OUT",
        )
