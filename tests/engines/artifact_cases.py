"""What is shown to vLLM with w4pack installed: the artifact of every fixture, and broken artifacts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cases import Case, Shelf, oracle, save, settings, write_safetensors

from w4pack.convert import check, convert
from w4pack.convert.errors import W4PackError

Tensors = dict[str, oracle.Tensor]
DENSE, EXPERTS = "gptqmodel-w4g32-asym-desc-qwen2", "gptqmodel-w4g32-sym-desc-mixtral"
SPLIT = ("legacymarlin-w4g128-llama", "autoawq-marlin-w4g128-llama", "legacymarlin-w4g128-qwen2")
OTHER_LOADER = (
    "gptqmodel-w4g128-asym-llama",
    "gptqmodel-w4g32-sym-desc-mixtral",
    "gptqmodel-w4g64-lmhead-llama",
)
Q, W1 = "model.layers.0.self_attn.q_proj", "model.layers.0.block_sparse_moe.experts.1.w1"


def artifact(shelf: Shelf, name: str) -> Path | None:
    """Convert a fixture; None where it cannot become an artifact."""
    out = shelf.root / "artifacts" / name
    out.parent.mkdir(exist_ok=True)
    if not out.exists():
        try:
            convert(shelf.source(name), out)
        except W4PackError:
            return None
    return out


def verdict(folder: Path, ranks: int) -> tuple[str, str]:
    """Return what `check` says of an artifact in vLLM: what is expected of the engine, and the rule."""
    (answer,) = check(folder, engines=["vllm"], tp=[ranks])
    (result,) = answer["results"]
    blockers = result["blockers"]
    expect = {"ok": "equal", "slow": "equal"}.get(result["verdict"], result["verdict"])
    return expect, blockers[0]["rule"] if blockers else ""


def artifacts(shelf: Shelf, names: list[str]) -> Iterator[Case]:
    """Return every fixture's artifact; some on two ranks, in bfloat16, and by the engine's own loader."""
    for name in names:
        out = artifact(shelf, name)
        if out is None:
            continue
        ways: list[dict[str, Any]] = [{}]
        ways += [{"ranks": 2}] * (name in SPLIT)
        ways += [{"loader": "safetensors"}, {"dtype": "bfloat16"}] * (name in OTHER_LOADER)
        for how in ways:
            expect, rule = verdict(out, how.get("ranks", 1))
            label = "".join(f"-{key}-{value}" for key, value in how.items())
            yield Case(f"plugin-{name}{label}", "plugin", out, shelf.source(name), expect, rule, **how)
    split = artifact(shelf, "gptqmodel-w4g128-sym-llama")
    if "gptqmodel-w4g128-sym-llama" in names and split is not None:
        truth = shelf.source("gptqmodel-w4g128-sym-llama")
        yield Case("plugin-cut-group", "plugin", split, truth, *verdict(split, 2), ranks=2)


# ---- broken ----------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[Tensors], Any]:
    """Return an edit that removes a tensor."""
    return lambda tensors: tensors.pop(name)


def put(name: str, tag: str, *shape: int) -> Callable[[Tensors], Any]:
    """Return an edit that adds a tensor of zeros."""
    size = 2 if tag == "F16" else 4
    for n in shape:
        size *= n
    return lambda tensors: tensors.update({name: oracle.Tensor(tag, shape, bytes(size))})


def swap(one: str, other: str) -> Callable[[Tensors], Any]:
    """Return an edit that exchanges two tensors."""
    return lambda tensors: tensors.update({one: tensors[other], other: tensors[one]})


def no_order(name: str) -> Callable[[Tensors], Any]:
    """Return an edit that makes an act-order read one input twice."""

    def edit(tensors: Tensors) -> None:
        old = tensors[name]
        tensors[name] = oracle.Tensor(old.tag, old.shape, old.data[4:8] + old.data[4:])

    return edit


# label, fixture, edit of the tensors, what the error names
TENSORS: tuple[tuple[str, str, Callable[[Tensors], Any], str], ...] = (
    ("weight-missing", DENSE, drop(f"{Q}.weight"), f"{Q}.weight"),
    ("scales-missing", DENSE, drop(f"{Q}.weight_scale"), f"{Q}.weight_scale"),
    ("bias-missing", DENSE, drop(f"{Q}.bias"), f"{Q}.bias"),
    ("norm-missing", DENSE, drop("model.norm.weight"), "model.norm.weight"),
    ("order-missing", EXPERTS, drop(f"{W1}.act_perm"), f"{W1}.act_perm"),
    ("bias-extra", DENSE, put("model.layers.0.self_attn.o_proj.bias", "F16", 64), "self_attn.o_proj.bias"),
    ("layer-extra", DENSE, put("model.layers.0.self_attn.gate.weight", "F16", 4, 4), "self_attn.gate"),
    ("scales-shape", DENSE, put(f"{Q}.weight_scale", "F16", 1, 64), f"{Q}.weight_scale"),
    ("swapped", DENSE, swap(f"{Q}.weight", "model.layers.0.mlp.up_proj.weight"), f"{Q}.weight"),
    ("order-broken", DENSE, no_order("model.layers.0.mlp.down_proj.act_perm"), "mlp.down_proj"),
    ("expert-order-broken", EXPERTS, no_order(f"{W1}.act_perm"), "experts.0.w1"),
)
# label, edit of quantization_config, what the error names
SETTINGS: tuple[tuple[str, Callable[[dict[str, Any]], Any], str], ...] = (
    ("version", lambda quant: quant.update(artifact_version=2), "artifact_version"),
    ("layout", lambda quant: quant.update(layout="marlin-8x8"), "layout"),
    ("key", lambda quant: quant.update(sparsity=True), "sparsity"),
    ("online", lambda quant: quant.update(online=[{"kind": "hadamard", "site": "mlp_mid"}]), "online"),
)


def damaged(shelf: Shelf) -> Iterator[Case]:
    """Return artifacts that the plugin refuses at start, naming what is wrong."""
    for label, name, edit, says in TENSORS:
        place = copied(shelf, name, f"artifact-{label}")
        tensors = oracle.read_folder(place)
        edit(tensors)
        write_safetensors(place / "model.safetensors", tensors)
        yield refused(shelf, name, label, place, says)
    for label, change, says in SETTINGS:
        place = copied(shelf, DENSE, f"artifact-{label}")
        config = settings(place)
        change(config["quantization_config"])
        save(place, config)
        yield refused(shelf, DENSE, label, place, says)
    short = copied(shelf, DENSE, "artifact-truncated")
    content = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(content[:-64])
    yield refused(shelf, DENSE, "truncated", short, "model.safetensors")
    whole = copied(shelf, DENSE, "artifact-without-plugin")
    yield Case("stock-artifact", "stock", whole, shelf.source(DENSE), "refuses", "vllm.plugin", says="w4pack")


def refused(shelf: Shelf, name: str, label: str, place: Path, says: str) -> Case:
    """Return the case."""
    return Case(f"plugin-broken-{label}", "plugin", place, shelf.source(name), "refuses", says=says)


def copied(shelf: Shelf, name: str, label: str) -> Path:
    """Return a copy of a fixture's artifact."""
    made = artifact(shelf, name)
    assert made is not None
    return shutil.copytree(made, shelf.root / "edited" / label)
