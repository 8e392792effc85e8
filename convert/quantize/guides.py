"""Finds the guides of keys on calibration text: see ``quantize.activations`` for what a guide does.

What a key's error does to a layer's output: with p the weights of the softmax, o the output of a query q and
e the key's error, the output moves by ``p (q e) (v - o)``, to first order. So errors of a key count by
``m = p^2 |v - o|^2`` and by the query they meet:

    offset     mean of the keys, each weighted by the sum of m |q|^2 over the queries
    direction  of C, the sum of m q q^T over queries and keys, the first eigenvector, its length such that
               ``|e|^2 + (w e)^2`` is ``e^T C e`` with all other eigenvalues replaced by their mean

where the sums run over the query heads that read the key's head. Scores that go through a soft cap, or that
compete with a learned sink, see an offset: there it is 0.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from w4pack.convert.errors import Refused

WATCHED = "w4pack_watched"  # the name under which transformers finds the attention that is watched
# Of the first eigenvalue, what the mean of the others counts at least: C of fewer queries than the head has
# values, or of none, has no others, and a direction alone would count.
LEAST = 1e-4
SEES_OFFSET = ("softcap", "s_aux", "sinks")  # arguments of an attention
SOFTCAP = "attn_logit_softcapping"  # of a config
LARGEST = 1e6  # what 15 steps of the largest scale of a cached row, in fp16, reach


@dataclass(slots=True, eq=False)
class Sums:
    """What is summed over the queries of one layer, float64 on the device of the queries.

    keys     (kv heads, head size): weighted
    weights  (kv heads,): of the keys
    queries  (kv heads, head size, head size): C
    fixed    whether the offset must be 0
    """

    keys: torch.Tensor
    weights: torch.Tensor
    queries: torch.Tensor
    fixed: bool = False

    @staticmethod
    def empty(kv_heads: int, size: int, device: torch.device | str = "cpu") -> "Sums":
        """Return sums over nothing, whose guide is 0. ``size``: of a head."""
        return Sums(
            torch.zeros(kv_heads, size, dtype=torch.float64, device=device),
            torch.zeros(kv_heads, dtype=torch.float64, device=device),
            torch.zeros(kv_heads, size, size, dtype=torch.float64, device=device),
        )

    def add(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
        softcap: float = 0.0,
    ) -> None:
        """Add the queries (B, heads, T, size) over keys and values (B, kv heads, T, size).

        mask: (1 or B, 1 or heads, T, T), bool for what is seen or float that is added; None: causal.
        """
        group = q.shape[1] // k.shape[1]
        for row in range(q.shape[0]):
            for head in range(k.shape[1]):
                mine = q[row, head * group : (head + 1) * group].float()
                keys, values = k[row, head].float(), v[row, head].float()
                p = _softmax(mine @ keys.T * scale, _of_heads(mask, row, head, group), softcap)
                counts = p.square() * _squares(values, p @ values)
                self._add(head, mine, keys, counts)

    def _add(self, head: int, q: torch.Tensor, keys: torch.Tensor, counts: torch.Tensor) -> None:
        """Add queries (group, T, size) with what their keys count (group, T, T)."""
        of_keys = (counts * q.square().sum(-1, keepdim=True)).sum((0, 1))
        weighted = (q * counts.sum(-1, keepdim=True)).flatten(0, 1)
        self.keys[head] += of_keys @ keys
        self.weights[head] += of_keys.sum()
        self.queries[head] += weighted.T @ q.flatten(0, 1)

    def guide(self, turn: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
        """Return the guide float32 (2, kv heads, head size), on the CPU. ``turn``: the transform of keys."""
        keys, weights, queries = self.keys.cpu(), self.weights.cpu(), self.queries.cpu()
        offset = keys / weights.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
        if self.fixed:
            offset = torch.zeros_like(offset)
        found = torch.stack([offset, _direction(queries)]).float()
        return found if turn is None else turn(found)


def _of_heads(mask: torch.Tensor | None, row: int, head: int, group: int) -> torch.Tensor | None:
    """Return the part (1 or group, T, T) of a mask that some query heads of a row see."""
    if mask is None:
        return None
    mine = mask[row if mask.shape[0] > 1 else 0]
    return mine[head * group : (head + 1) * group] if mine.shape[0] > 1 else mine


def _softmax(scores: torch.Tensor, mask: torch.Tensor | None, softcap: float) -> torch.Tensor:
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    seen = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(seen, -1).nan_to_num(0.0)  # a query that sees nothing


def _squares(values: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return |v - o|^2 of each value (T, size) and output (group, T, size): (group, T, T)."""
    own = values.square().sum(-1) + outputs.square().sum(-1, keepdim=True)
    return (own - 2 * outputs @ values.T).clamp_(min=0)


def _direction(queries: torch.Tensor) -> torch.Tensor:
    """Return w (kv heads, head size) of C: see above. Its sign is that of its largest entry."""
    values, vectors = torch.linalg.eigh(queries)
    first, others = values[:, -1], values[:, :-1].mean(-1)
    least = first * LEAST
    length = (
        (first - others) / torch.maximum(others, least).clamp(min=torch.finfo(torch.float64).tiny)
    ).sqrt()
    unit = vectors[:, :, -1]
    largest = unit.gather(-1, unit.abs().argmax(-1, keepdim=True))
    made: torch.Tensor = unit * largest.sign() * length[:, None]
    return made


@contextmanager
def watched(layer: nn.Module, into: Sums) -> Iterator[None]:
    """Let a decoder layer's attention add its queries, keys and values to sums.

    Of attention that is not called through transformers' interface of functions nothing is seen, and the
    guide is 0: ``modeljobs.prepared`` warns of that.
    """
    from transformers import AttentionInterface

    found = [getattr(module, "config", None) for module in layer.modules()]
    configs: dict[int, Any] = {id(c): c for c in found if hasattr(c, "_attn_implementation")}
    own: dict[int, str] = {key: config._attn_implementation for key, config in configs.items()}

    def attention(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, *args: Any, **more: Any) -> Any:
        softcap = more.get("softcap") or 0.0
        into.fixed |= any(more.get(name) is not None for name in SEES_OFFSET)
        into.add(q, k, v, more.get("scaling") or q.shape[-1] ** -0.5, mask, softcap)
        return _function(module, own[id(module.config)])(module, q, k, v, mask, *args, **more)

    AttentionInterface.register(WATCHED, attention)
    try:
        for config in configs.values():
            config._attn_implementation = WATCHED
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = own[key]


def _function(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the attention function that a module calls under a name, as transformers finds it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get(name, eager)
    return found


def refuse_guide(name: str, guide: torch.Tensor, softcap: float | None) -> None:
    """Refuse values that no calibration finds, and an offset where scores go through a soft cap.

    guide    (2, kv heads, head size): offset and direction
    softcap  of the model's scores, None or 0 for none
    """
    largest = float(guide.abs().max())
    if not largest < LARGEST:
        raise Refused(
            "the values of a guide of keys are not those of a calibration",
            code="artifact-online",
            where=name,
            expected=f"numbers below {LARGEST:g}: no cached key is larger",
            found=f"{largest:.3g}",
            hint="w4pack verify with the artifact, or --kv-bits 16",
        )
    if softcap and bool(guide[0].any()):
        raise Refused(
            "an offset of keys changes scores that go through a soft cap",
            code="artifact-online",
            where=name,
            expected=f"an offset of 0: {SOFTCAP} is {softcap}",
            found=f"up to {float(guide[0].abs().max()):.3g}",
            hint="--kv-bits 16",
        )
