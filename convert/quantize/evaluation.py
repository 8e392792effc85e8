"""Perplexity, and the divergence of one model's predictions from another's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from w4pack.convert.files.provider import Provider
from w4pack.convert.quantize.skeleton import Between, Nothing, Skeleton, build
from w4pack.convert.quantize.stream import Stream, batches_of

ROWS = 256  # tokens whose log-probabilities are in memory at a time
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 7: 2.36, 9: 2.26, 15: 2.13, 19: 2.09, 39: 2.02}


@dataclass(slots=True)
class Score:
    """Sums over windows. nll: mean nats a scored token, one a window."""

    nll: list[float] = field(default_factory=list)
    scored: int = 0

    @property
    def perplexity(self) -> float:
        """exp of the mean over windows, which are equally long."""
        mean = sum(self.nll) / max(len(self.nll), 1)
        return math.exp(mean) if mean < 700 else math.inf


@dataclass(slots=True)
class Difference:
    """One model against another, token by token. kl in nats; agree: share of equal likeliest tokens."""

    kl: list[torch.Tensor] = field(default_factory=list)
    agree: list[torch.Tensor] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Return mean, 99.9th percentile and agreement."""
        kl, agree = torch.cat(self.kl), torch.cat(self.agree)
        return {
            "kl_mean": float(kl.mean()),
            "kl_p999": float(torch.quantile(kl[: 1 << 24], 0.999)),
            "top1_agreement": float(agree.double().mean()),
        }


def divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return KL(reference, other) of each token, from logits (..., vocabulary), in float32. Flat."""
    found = []
    pairs = zip(_rows(reference), _rows(other), strict=True)
    for a, b in pairs:
        p, q = functional.log_softmax(a.float(), -1), functional.log_softmax(b.float(), -1)
        found.append((p.exp() * (p - q)).sum(-1).clamp(min=0).cpu())
    return torch.cat(found)


def _rows(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(logits.reshape(-1, logits.shape[-1]), ROWS)


def through(
    config: Mapping[str, Any],
    provider: Provider,
    windows: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype,
    *,
    per_batch: int,
    between: Between | None = None,
    told: Any = None,
) -> Stream:
    """Send windows (W, L) of tokens through a model, one layer in memory; then ask for its logits.

    ``between``: what its runtime does between the linears.
    """
    skeleton: Skeleton = build(config, provider, device, dtype)
    skeleton.fill_outside(head=True)
    stream = Stream(skeleton, batches_of(windows, per_batch))
    stream.begin()
    for index, layer in enumerate(skeleton.layers):
        skeleton.fill(layer, skeleton.prefix(index))
        with (between or Nothing()).around(skeleton, layer, index):
            stream.advance(layer, index)
        skeleton.empty(layer)
        if told is not None:
            told(index + 1, len(skeleton.layers))
    return stream


def compare(stream: Stream, reference: Stream | None) -> tuple[Score, Score | None, Difference | None]:
    """Score tokens 2 to L of each window, and compare with another model's predictions of the same tokens."""
    own, other, difference = Score(), Score() if reference else None, Difference() if reference else None
    for number, batch in enumerate(stream.tokens):
        for row, tokens in enumerate(batch):
            logits = stream.logits(number, row)
            _score(own, logits, tokens)
            if reference is not None and other is not None and difference is not None:
                theirs = reference.logits(number, row)
                _score(other, theirs, tokens)
                difference.kl.append(divergence(theirs[:-1], logits[:-1]))
                difference.agree.append((theirs[:-1].argmax(-1) == logits[:-1].argmax(-1)).cpu())
    return own, other, difference


def _score(score: Score, logits: torch.Tensor, tokens: torch.Tensor) -> None:
    target = tokens[1:].to(logits.device)
    score.nll.append(float(functional.cross_entropy(logits[:-1], target)))
    score.scored += target.numel()


def interval(differences: list[float]) -> tuple[float, float]:
    """Return mean and half width of the 95 % interval of paired differences."""
    count = len(differences)
    mean = sum(differences) / count
    if count < 2:
        return mean, math.inf
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (count - 1))
    factor = next((t for n, t in sorted(T_95.items(), reverse=True) if n <= count - 1), 12.71)
    return mean, (1.96 if count > 200 else factor) * spread / math.sqrt(count)
