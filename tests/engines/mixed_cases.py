"""Artifacts that vLLM runs though it stacks experts and ties heads itself: experts that differ, a tied head,
a model that pools.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from artifact_cases import artifact
from cases import Case, Shelf, oracle, save, settings, write_safetensors

EXPERTS, HEAD, PLAIN = (
    "gptqmodel-w4g32-sym-mixtral",
    "gptqmodel-w4g64-lmhead-llama",
    "gptqmodel-w4g128-asym-llama",
)
IN_16_BIT = r"re:.*experts\.3\.down_proj"  # as the source names it
LAYER = "model.layers.0.block_sparse_moe.experts"
LEAVES = ("w1", "w2", "w3")
EIGHTS = -0x77777778  # of eight 4-bit zero points of 8, as a signed word


def kinds(shelf: Shelf, *, ordered: bool = True, ranks: int = 1) -> Path:
    """Return experts of several kinds that are worth what the source's are.

    Expert 1 gets zero points, which are those of a symmetric scheme; expert 2, if ``ordered``, an order,
    which is the natural one; of expert 3 a layer is left in 16 bit. Of several ``ranks`` so is attention,
    which is too narrow for them.
    """
    name = f"{EXPERTS}-kinds{'' if ordered else '-unordered'}{ranks}"
    place = shelf.root / "edited" / name
    if place.exists():
        return place
    ignored = [IN_16_BIT, *[r"re:.*self_attn.*"] * (ranks > 1)]
    made = artifact(shelf, EXPERTS, f"-kinds{ranks}", ignore=ignored)
    assert made is not None
    shutil.copytree(made, place)
    tensors, config = oracle.read_folder(place), settings(place)
    modules = config["quantization_config"]["modules"]
    for leaf in LEAVES:
        one, two = f"{LAYER}.1.{leaf}", f"{LAYER}.2.{leaf}"
        groups, columns = tensors[f"{one}.weight_scale"].shape
        words = np.full((groups, columns // 8), EIGHTS, np.int32)
        tensors[f"{one}.weight_zero_point"] = oracle.Tensor("I32", words.shape, words.tobytes())
        rows = 16 * tensors[f"{two}.weight"].shape[0]
        modules[one] = scheme(rows, columns, sym=False)
        if ordered:
            order = np.arange(rows, dtype=np.int32)
            tensors[f"{two}.act_perm"] = oracle.Tensor("I32", order.shape, order.tobytes())
            modules[two] = scheme(rows, columns, act_order=True)
    save(place, config)
    write_safetensors(place / "model.safetensors", tensors)
    return place


def scheme(rows: int, columns: int, **changes: bool) -> dict[str, Any]:
    """Return what config.json says of a layer that is not padded."""
    sizes = {"in_features": rows, "out_features": columns, "stored_in": rows, "stored_out": columns}
    return {"bits": 4, "group_size": 32, "sym": True, "act_order": False, **sizes, **changes}


def tied(shelf: Shelf) -> Path:
    """Return an artifact with a packed head whose config.json ties the head to the embedding."""
    place = shelf.root / "edited" / f"{HEAD}-tied"
    if not place.exists():
        made = artifact(shelf, HEAD)
        assert made is not None
        shutil.copytree(made, place)
        save(place, settings(place) | {"tie_word_embeddings": True})
    return place


def mixed(shelf: Shelf) -> Iterator[Case]:
    """Return the cases of the newest release."""
    yield from few("plugin", shelf)
    source = shelf.source(EXPERTS)
    ways: dict[str, dict[str, Any]] = {
        "compiled": {"options": {"enforce_eager": False}},
        "reload": {"reload": True},
    }
    for label, how in ways.items():
        yield Case(f"plugin-{EXPERTS}-kinds-{label}", "plugin", kinds(shelf), source, "equal", **how)
    yield from on_two_ranks(shelf, source)
    packed = artifact(shelf, PLAIN)
    assert packed is not None
    yield Case(f"plugin-{PLAIN}-pooling", "plugin", packed, shelf.source(PLAIN), "equal", pooled=True)


def on_two_ranks(shelf: Shelf, source: Path) -> Iterator[Case]:
    """Return experts of several kinds, whole ones on either rank, or each cut in two."""
    name, two = f"plugin-{EXPERTS}-kinds-ranks-2", {"ranks": 2}
    ordered, plain = (kinds(shelf, ordered=ordered, ranks=2) for ordered in (True, False))
    whole = {"enable_expert_parallel": True}
    yield Case(f"{name}-whole", "plugin", ordered, source, "equal", options=whole, **two)
    yield Case(f"{name}-cut", "plugin", plain, source, "equal", **two)
    yield Case(f"{name}-order", "plugin", ordered, source, "refuses", "vllm.plugin-k-order", **two)


def few(engine: str, shelf: Shelf) -> Iterator[Case]:
    """Return one case of each kind."""
    yield Case(f"{engine}-{EXPERTS}-kinds", engine, kinds(shelf), shelf.source(EXPERTS), "equal")
    yield Case(f"{engine}-{HEAD}-tied", engine, tied(shelf), shelf.source(HEAD), "equal")
