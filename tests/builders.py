"""Slow, obvious makers of source checkpoints: loops over the fields of a word, no product code.

A `Model` is a config, its dense tensors and its quantized linears; ``write`` lays it out in one of the
formats that tools have published. Every number is drawn from a seeded generator.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle import AWQ_ORDER, CARRIER, Linear, Tensor, gemv_fast_place, marlin_place, midpoint, plain_groups

Tensors = dict[str, Tensor]
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ZERO_ONES = {4: 0x11111111, 8: 0x01010101}


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def tensor(values: NDArray[Any], tag: str) -> Tensor:
    """Wrap an array whose dtype is already the carrier of ``tag``."""
    values = np.ascontiguousarray(values)
    return Tensor(tag, values.shape, values.astype(CARRIER[tag], copy=False).tobytes())


def floats(values: NDArray[Any], tag: str) -> NDArray[Any]:
    """Convert float values to the carrier of ``tag`` (BF16 by dropping the low half of the word)."""
    if tag == "BF16":
        return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> np.uint32(16)).astype("<u2")
    return values.astype(CARRIER[tag])


def dense(rng: np.random.Generator, *shape: int, tag: str = "F16") -> Tensor:
    """Draw a dense tensor."""
    return tensor(floats(rng.normal(0, 0.05, shape), tag), tag)


# --- layers -----------------------------------------------------------------------------------------------


def layer(
    rng: np.random.Generator,
    k: int,
    n: int,
    *,
    bits: int = 4,
    group: int = 128,
    sym: bool = True,
    order: NDArray[Any] | None = None,
    tag: str = "F16",
    bias: Tensor | None = None,
) -> Linear:
    """Draw one linear. ``order`` is a permutation p of K: row k belongs to group p(k) // g. Zeros avoid 0."""
    size = k if group == -1 else group
    count = -(-k // size)
    gi = (np.arange(k) // size).astype(np.int32)
    if order is not None:
        gi = gi[order]
    zeros = midpoint((count, n), bits)
    if not sym:
        zeros = rng.integers(1, 1 << bits, (count, n)).astype(np.uint8)
        zeros[0, 0] = 3  # never all midpoints by accident
    codes = rng.integers(0, 1 << bits, (k, n)).astype(np.uint8)
    scales = floats(rng.uniform(0.001, 0.01, (count, n)).astype(np.float32), tag)
    return Linear(codes, zeros, scales, gi, bits, tag, bias)


def act_order(rng: np.random.Generator, k: int) -> NDArray[np.int64]:
    """Draw a permutation of the rows: an activation order that is none of the trivial kinds."""
    return rng.permutation(k)


# --- words ------------------------------------------------------------------------------------------------


def pack_words(fields: NDArray[np.uint8], bits: int, axis: int) -> NDArray[np.int32]:
    """Pack fields into 32-bit words along ``axis``, low bits first; a ragged end is filled with zeros."""
    per_word = 32 // bits
    fields = np.moveaxis(fields, axis, 0)
    count = -(-fields.shape[0] // per_word)
    words = np.zeros((count, *fields.shape[1:]), np.uint32)
    for slot in range(per_word):
        part = fields[slot::per_word].astype(np.uint32)
        words[: part.shape[0]] |= part << np.uint32(bits * slot)
    return np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32)


def marlin_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Lay codes (K, N) out in 16 x 64 tiles: int32 (K/16, N*bits/2)."""
    k, n = codes.shape
    chunk = 32 * bits
    words = np.zeros((k // 16, n * bits // 2), np.uint32)
    for kk in range(16):
        for nn in range(64):
            word, slot = marlin_place(kk, nn, bits)
            words[:, word::chunk] |= codes[kk::16, nn::64].astype(np.uint32) << np.uint32(bits * slot)
    return words.view(np.int32)


def marlin_scales(scales: NDArray[Any]) -> NDArray[Any]:
    """Order scales as the kernels of the time did: by 64 columns for groups, by 32 for one group."""
    out = np.zeros_like(scales)
    if scales.shape[0] == 1:
        for n in range(32):
            out[:, 8 * ((n % 8) // 2) + 2 * (n // 8) + n % 2 :: 32] = scales[:, n::32]
        return out
    for n in range(64):
        out[:, 8 * (n % 8) + n // 8 :: 64] = scales[:, n::64]
    return out


# --- formats ----------------------------------------------------------------------------------------------


def with_bias(out: Tensors, name: str, linear: Linear) -> Tensors:
    """Add the bias where the layer has one."""
    if linear.bias is not None:
        out[f"{name}.bias"] = linear.bias
    return out


def gptq(name: str, linear: Linear, *, version: int = 1, g_idx: bool = True) -> Tensors:
    """Write GPTQ tensors; v1 subtracts one from every field by a subtraction on the whole word."""
    words = pack_words(linear.zeros, linear.bits, 1).view(np.uint32)
    if version == 1:
        words = words - np.uint32(ZERO_ONES[linear.bits])
    out = {
        f"{name}.qweight": tensor(pack_words(linear.codes, linear.bits, 0), "I32"),
        f"{name}.qzeros": tensor(words.view(np.int32), "I32"),
        f"{name}.scales": tensor(linear.scales, linear.tag),
    }
    if g_idx:
        out[f"{name}.g_idx"] = tensor(linear.gi, "I32")
    return with_bias(out, name, linear)


def gptq_v2(name: str, linear: Linear) -> Tensors:
    """Write GPTQ tensors with the zero points as they are."""
    return gptq(name, linear, version=2)


def gptq_bare(name: str, linear: Linear) -> Tensors:
    """Write GPTQ tensors without a group map, as AutoRound does."""
    return gptq(name, linear, g_idx=False)


def awq_gemm(name: str, linear: Linear) -> Tensors:
    """Write AWQ gemm: eight columns a word in the order 0 2 4 6 1 3 5 7."""
    packed = []
    for fields in (linear.codes, linear.zeros):
        woven = np.zeros_like(fields)
        for slot, column in enumerate(AWQ_ORDER):
            woven[:, slot::8] = fields[:, column::8]
        packed.append(tensor(pack_words(woven, 4, 1), "I32"))
    out = {f"{name}.qweight": packed[0], f"{name}.qzeros": packed[1]}
    return with_bias(out | {f"{name}.scales": tensor(linear.scales, linear.tag)}, name, linear)


def awq_gemv(name: str, linear: Linear) -> Tensors:
    """Write AWQ gemv: packed along K, groups padded to whole words of a multiple that depends on g."""
    count = linear.scales.shape[0]
    size = linear.k // count
    multiple = 1 if size >= 128 else {64: 2, 32: 4}[size]
    width = multiple * ceil_div(ceil_div(count, 8), multiple)
    zeros = np.zeros((linear.n, 8 * width), np.uint8)
    zeros[:, :count] = linear.zeros.T
    scales = np.zeros((linear.n, 8 * width), linear.scales.dtype)
    scales[:, :count] = linear.scales.T
    out = {
        f"{name}.qweight": tensor(pack_words(linear.codes.T, 4, 1), "I32"),
        f"{name}.qzeros": tensor(pack_words(zeros, 4, 1), "I32"),
        f"{name}.scales": tensor(scales, linear.tag),
    }
    return with_bias(out, name, linear)


def awq_gemv_fast(name: str, linear: Linear) -> Tensors:
    """Write AWQ gemv_fast: four rows woven into 16-bit words; zeros as -(z * s) in fp16."""
    words = np.zeros((linear.n // 4, linear.k), np.uint16)
    for kk in range(64):
        for nn in range(4):
            word, nibble = gemv_fast_place(kk, nn)
            words[:, word::64] |= linear.codes[kk::64, nn::4].T.astype(np.uint16) << np.uint16(4 * nibble)
    count = linear.scales.shape[0]
    size = linear.k // count
    multiple = 1 if size >= 128 else {64: 2, 32: 4}[size]
    rows = 8 * multiple * ceil_div(ceil_div(count, 8), multiple)
    scales, zeros = np.zeros((rows, linear.n), "<f2"), np.zeros((rows, linear.n), "<f2")
    scales[:count] = linear.scales
    product = linear.scales.astype(np.float32) * linear.zeros.astype(np.float32)
    zeros[:count] = -product.astype("<f2")
    out = {
        f"{name}.qweight": tensor(words.view(np.int16), "I16"),
        f"{name}.qzeros": tensor(zeros, "F16"),
        f"{name}.scales": tensor(scales, "F16"),
    }
    return with_bias(out, name, linear)


def awq_marlin(name: str, linear: Linear) -> Tensors:
    """Write AWQ's marlin version: tiles under ``qweight``, no zeros."""
    out = {
        f"{name}.qweight": tensor(marlin_words(linear.codes, 4), "I32"),
        f"{name}.scales": tensor(marlin_scales(linear.scales), "F16"),
    }
    return with_bias(out, name, linear)


def legacy(name: str, linear: Linear) -> Tensors:
    """Write the first Marlin checkpoints: ``B`` and ``s``."""
    out = {
        f"{name}.B": tensor(marlin_words(linear.codes, 4), "I32"),
        f"{name}.s": tensor(marlin_scales(linear.scales), "F16"),
    }
    return with_bias(out, name, linear)


def compressed(name: str, linear: Linear) -> Tensors:
    """Write compressed-tensors pack-quantized; a real group map becomes ``weight_g_idx``."""
    out = {
        f"{name}.weight_packed": tensor(pack_words(linear.codes.T, linear.bits, 1), "I32"),
        f"{name}.weight_scale": tensor(np.ascontiguousarray(linear.scales.T), linear.tag),
        f"{name}.weight_shape": tensor(np.array([linear.n, linear.k]), "I64"),
    }
    if not linear.sym:
        out[f"{name}.weight_zero_point"] = tensor(pack_words(linear.zeros.T, linear.bits, 0), "I32")
    if (np.diff(linear.gi) < 0).any():
        out[f"{name}.weight_g_idx"] = tensor(linear.gi, "I32")
    return with_bias(out, name, linear)


Writer = Callable[[str, Linear], Tensors]

# --- configs ----------------------------------------------------------------------------------------------


def gptq_config(
    *, sym: bool = True, group: int = 128, bits: int = 4, desc: bool = False, **more: Any
) -> dict[str, Any]:
    """Return a GPTQ block as old and new tools write it."""
    base = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc, "sym": sym}
    return {**base, "checkpoint_format": "gptq", "lm_head": False, **more}


def awq_config(*, version: str = "gemm", group: int = 128, **more: Any) -> dict[str, Any]:
    """Return an AWQ block."""
    base = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}
    return {**base, "modules_to_not_convert": None, **more}


def compressed_config(
    *, sym: bool = True, group: int = 128, bits: int = 4, ignore: Iterable[str] = ("lm_head",), **more: Any
) -> dict[str, Any]:
    """Return a compressed-tensors block with one group of schemes."""
    weights = {
        "num_bits": bits, "type": "int", "symmetric": sym, "dynamic": False,
        "strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group,
    }  # fmt: skip
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": scheme}, "ignore": list(ignore), "kv_cache_scheme": None, **more,
    }  # fmt: skip


def llama_config(**more: Any) -> dict[str, Any]:
    """Return the config of the smallest Llama whose shapes are all on the tile."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float16",
        **more,
    }


def qwen2_config(**more: Any) -> dict[str, Any]:
    """Return a Qwen2 config: q, k and v have biases."""
    changes = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **more}
    config = llama_config(**changes)
    del config["attention_bias"], config["mlp_bias"]
    return config


def mixtral_config(**more: Any) -> dict[str, Any]:
    """Return a Mixtral config with four experts."""
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256, **more}
    return llama_config(architectures=["MixtralForCausalLM"], model_type="mixtral", **changes)


def qwen3_moe_config(**more: Any) -> dict[str, Any]:
    """Return a Qwen3-MoE config with four experts."""
    changes = {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True, **more,
    }  # fmt: skip
    return llama_config(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **changes)


# --- models -----------------------------------------------------------------------------------------------


@dataclass
class Model:
    """A checkpoint before it has a format."""

    config: dict[str, Any]
    dense: Tensors
    linears: dict[str, Linear] = field(default_factory=dict)

    def named(self, ending: str) -> str:
        """Return the one linear whose name ends so."""
        (name,) = [n for n in self.linears if n.endswith(ending)]
        return name


def sizes(config: dict[str, Any], kind: str) -> tuple[int, int]:
    """Return (K, N) of a linear of the decoder block."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    table = {
        "q_proj": (hidden, heads), "o_proj": (heads, hidden),
        "k_proj": (hidden, config["num_key_value_heads"] * config["head_dim"]),
        "v_proj": (hidden, config["num_key_value_heads"] * config["head_dim"]),
        "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
        "w1": (hidden, inner), "w3": (hidden, inner), "w2": (inner, hidden),
    }  # fmt: skip
    return table[kind.rsplit(".", 1)[-1]]


def skeleton(rng: np.random.Generator, config: dict[str, Any], tag: str = "F16") -> Tensors:
    """Return embeddings, norms, head (unless tied) and routers."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    out = {
        "model.embed_tokens.weight": dense(rng, vocab, hidden, tag=tag),
        "model.norm.weight": dense(rng, hidden, tag=tag),
    }
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = dense(rng, vocab, hidden, tag=tag)
    for i in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{i}.{norm}.weight"] = dense(rng, hidden, tag=tag)
        if config["model_type"] == "qwen3_moe":
            for norm in ("q_norm", "k_norm"):
                out[f"model.layers.{i}.self_attn.{norm}.weight"] = dense(rng, config["head_dim"], tag=tag)
            out[f"model.layers.{i}.mlp.gate.weight"] = dense(rng, config["num_experts"], hidden, tag=tag)
        if config["model_type"] == "mixtral":
            out[f"model.layers.{i}.block_sparse_moe.gate.weight"] = dense(
                rng, config["num_local_experts"], hidden, tag=tag
            )
    return out


def block_modules(config: dict[str, Any], experts: str | None = None) -> list[str]:
    """Return the linears of one decoder block, relative to it, in the spelling of ``experts`` where given."""
    if config["model_type"] == "mixtral":
        prefix, names = experts or "block_sparse_moe.experts", ("w1", "w2", "w3")
        if prefix != "block_sparse_moe.experts" or experts is not None:
            names = ("gate_proj", "up_proj", "down_proj")
        return [*ATTENTION, *(f"{prefix}.{e}.{n}" for e in range(config["num_local_experts"]) for n in names)]
    if config["model_type"] == "qwen3_moe":
        return [*ATTENTION, *(f"mlp.experts.{e}.{n[4:]}" for e in range(config["num_experts"]) for n in MLP)]
    return [*ATTENTION, *MLP]


def model(
    seed: int,
    config: dict[str, Any] | None = None,
    *,
    experts: str | None = None,
    dense_tag: str = "F16",
    **scheme: Any,
) -> Model:
    """Draw a model whose block linears all have the scheme given (keywords of `layer`)."""
    rng = np.random.default_rng(seed)
    config = config or llama_config()
    out = Model(config, skeleton(rng, config, dense_tag))
    for i in range(config["num_hidden_layers"]):
        for name in block_modules(config, experts):
            k, n = sizes(config, name)
            bias = None
            if config["model_type"] == "qwen2" and name in ATTENTION[:3]:
                bias = dense(rng, n)
            out.linears[f"model.layers.{i}.{name}"] = layer(rng, k, n, bias=bias, **scheme)
    return out


def all_tensors(made: Model, writer: Writer | dict[str, Writer]) -> Tensors:
    """Return dense and packed tensors; ``writer`` may differ by module."""
    out = dict(made.dense)
    for name, linear in made.linears.items():
        out.update((writer[name] if isinstance(writer, dict) else writer)(name, linear))
    return out


# --- files ------------------------------------------------------------------------------------------------


def safetensors_bytes(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """Lay tensors out one after another behind their header."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": value.tag,
            "shape": list(value.shape),
            "data_offsets": [offset, offset + len(value.data)],
        }
        offset += len(value.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(v.data for v in tensors.values())


def write_json(path: Path, value: Any) -> None:
    """Write JSON with the indentation that tools use."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tensors(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """Write one file, or ``shards`` files that deal the tensors out in turn, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
        return
    names, where = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        where.update(dict.fromkeys(part, file))
        (folder / file).write_bytes(safetensors_bytes(part, {"format": "pt"}))
    total = sum(len(value.data) for value in tensors.values())
    write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where}
    )


def write(
    folder: Path,
    made: Model,
    writer: Writer | dict[str, Writer],
    settings: dict[str, Any] | None,
    *,
    shards: int = 1,
    extra: Tensors | None = None,
    drop: Iterable[str] = (),
) -> Path:
    """Write a whole checkpoint folder and return it."""
    tensors = all_tensors(made, writer) | (extra or {})
    for name in drop:
        del tensors[name]
    write_tensors(folder, tensors, shards)
    config = dict(made.config)
    if settings is not None:
        config["quantization_config"] = settings
    write_json(folder / "config.json", config)
    return folder


def header_only(path: Path, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Write a file whose header promises ``shapes`` and whose data is a hole: no bytes on the disk."""
    header, offset = {}, 0
    for name, (tag, shape) in shapes.items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(CARRIER[tag]).itemsize
        header[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def gptq_shapes(
    name: str, k: int, n: int, group: int, bits: int = 4
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return names, tags and shapes of one GPTQ linear without a group map."""
    count = plain_groups(k, -(-k // group), group)[-1] + 1
    return {
        f"{name}.qweight": ("I32", (k * bits // 32, n)),
        f"{name}.qzeros": ("I32", (int(count), n * bits // 32)),
        f"{name}.scales": ("F16", (int(count), n)),
    }
