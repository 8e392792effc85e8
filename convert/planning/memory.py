"""The most memory that a job takes, as its plan says it beforehand.

One definition, for the plan and for what is told while a job runs (``modeljobs.peaks``): the largest resident
set of the process, interpreter and libraries among it. The plan is at or above it on a CPU. On a card, host
and card share what it counts, and the card's own libraries come on top.
"""

import math
from collections.abc import Mapping

from w4pack.convert.core import families
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.quantizing import layer_index
from w4pack.convert.quantize.settings import STAGE_BYTES, WITNESS

INTERPRETER = 64 << 20  # bytes: Python, numpy and this package, 38 MiB; plan and headers of a large model
LIBRARIES = 512 << 20  # bytes: torch, transformers, a tokenizer and a model's class, imported: 391 MiB
LINEAR = 12 << 10  # bytes of a linear beside its tensors: module on ``meta`` (4 KiB), headers, plan, report
BLOCKS = 192 << 20  # bytes: what threads read, reorder and write at a time (measured: benchmarks)
ELEMENT = 44  # bytes an element of the largest tensor that is rotated: source, result, four float64 copies
WIDE = 4  # bytes of a float32, in which everything is computed on a CPU
LOGITS = 6  # copies of the logits of the witness tokens: of two models, and what is made of them


def peak_of(plan: Plan) -> int:
    """Return the largest resident set, in bytes, that a job is not expected to exceed."""
    if plan.quantization is None and plan.rotation is None:
        return INTERPRETER + BLOCKS
    work = BLOCKS if plan.quantization is None else _quantized(plan) + LINEAR * len(plan.layers)
    return LIBRARIES + work + _rotated(plan)


def _rotated(plan: Plan) -> int:
    """Return what making the largest tensor of a rotated model takes."""
    if plan.rotation is None:
        return 0
    return ELEMENT * max((math.prod(t.shape) for t in plan.tensors), default=0)


def _quantized(plan: Plan) -> int:
    """Return what choosing codes takes.

    Embeddings, head and norms; one layer, twice with GPTAQ; the widest Hessian and what is made of it; those
    of experts, up to their bound; the calibration tokens between two layers and inside one; the logits of the
    tokens that are compared in the end.
    """
    schemes = {layer.source: layer.scheme for layer in plan.layers}
    sizes: dict[int, int] = {}
    for name, s in schemes.items():
        index = layer_index(name)
        sizes[index] = sizes.get(index, 0) + s.in_features * s.out_features
    widest = max(s.in_features for s in schemes.values())
    largest = max(s.in_features * s.out_features for s in schemes.values())
    tokens = _tokens_of(plan)
    if tokens is None:
        return 12 * WIDE * largest
    outside = [d.shape for d in plan.dense if len(d.shape) == 2]
    logits = LOGITS * min(tokens, WITNESS) * max((shape[0] for shape in outside), default=0)
    hidden = min(s.in_features for s in schemes.values())
    streams = 3 * tokens * hidden + 4 * min(tokens, 8192) * widest
    hessians = min(_expert_hessians(schemes), STAGE_BYTES["cpu"])
    layer = 3 * max(sizes.values()) + 8 * widest * widest + 6 * largest
    return hessians + WIDE * (sum(map(math.prod, outside)) + layer + streams + logits)


def _tokens_of(plan: Plan) -> int | None:
    """Return the calibration tokens: as counted, or else as asked for; None for a method that needs none."""
    text, asked = (plan.quantization or {}).get("calibration"), plan.options["quantize"]
    if text is not None:
        return int(text["tokens"])
    return asked["samples"] * asked["seqlen"] if asked["method"] == "gptq" else None


def _expert_hessians(schemes: Mapping[str, QuantScheme]) -> int:
    """Return the bytes of the Hessians of all experts of a layer that are made in one run of it."""
    total: dict[tuple[int, str], int] = {}
    for name, s in schemes.items():
        if families.expert_index(name) is not None:
            stage = layer_index(name), name.rpartition(".")[2]
            total[stage] = total.get(stage, 0) + WIDE * s.in_features * s.in_features
    return max(total.values(), default=0)
