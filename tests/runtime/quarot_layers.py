"""How far a model with ``online`` records is from the fake-quantized one, layer by layer, on any device.

Layers are compared from the same input: after a first code that differs at a tie, streams drift.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import w4pack
from runtime import quarot_reference as fake
from runtime.quarot_calls import forced, layer_inputs, relative

TIES = 1e-4  # share of codes that may differ, by one
LAYER = 0.01  # relative error of a layer in 16 bit: about 30 roundings to fp16 and bf16-free sums
DRIFT = 0.7  # of what quantization itself changes: roundings to 16 bit move codes inside a layer


class Distance(NamedTuple):
    """A layer's relative error, and the most that roundings explain."""

    bits: int
    error: float
    most: float


def distances(out: Path, place: Path, tokens: Any, device: str) -> Iterator[Distance]:
    """Yield the distance of each layer, in 16 and then in 4 bit.

    Args:
        out: the artifact.
        place: an empty folder to work in.
        tokens: (B, T) int64, on the CPU.
        device: where the model runs; the reference is on the CPU.
    """
    exact = fake.FakeModel(out, place, 16, 16)
    for bits in (16, 4):
        model = w4pack.load(out, device, act_bits=bits, kv_bits=bits)
        if bits == 16:
            model.set_attn_implementation("eager")  # before 5.2x Gemma 2 lost its soft cap by default
        inputs, outputs = ([x.cpu() for x in found] for found in layer_inputs(model, tokens.to(device)))
        wanted, plain = (_wanted(exact, tokens, inputs, b) for b in (bits, 16))
        for x, y, z, rough in zip(inputs, outputs, wanted, plain, strict=True):
            most = LAYER if bits == 16 else DRIFT * relative(rough, z)
            yield Distance(bits, relative(y - x.float(), z), most)


def _wanted(exact: fake.FakeModel, tokens: Any, inputs: list[Any], bits: int) -> list[Any]:
    """Return what the reference's layers add to the same inputs."""
    exact.act_bits = exact.kv_bits = bits
    found = forced(exact.model, inputs, lambda: exact.logits(tokens))
    return [y - x.float() for x, y in zip(inputs, found, strict=True)]
