"""One decoder block of Llama-3-8B's shape: 4-bit weights, activations and cache beside fp16, in one run.

    python benchmarks/block.py [--batches 1,16] [--tokens 2048] [--group -1] [--tiny]

Both are transformers models of one layer with a small vocabulary, so the embedding, the last norm and the
head (one row of logits) are in both times and small. fp16 is the stock class with its fastest attention. Each
pass is captured in a CUDA graph and replayed, so that what is timed is the card's work: prefill of ``tokens``
with an empty cache, and one decoding step behind them in a static cache. Memory is allocated bytes: of the
block's weights, of the cache, and the peak of an eager prefill above what lay there before.
"""

import argparse
import inspect
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from cards import need
from llama import Noise
from synthetic import linears, write_shard
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

import w4pack
from w4pack.convert.rotate.rotation import make_rotation
from w4pack.kernels.bench.timing import recorded

SIZES = {"hidden": 4096, "inner": 14336, "kv": 1024}
TINY = {"hidden": 512, "inner": 1024, "kv": 128}
HEAD, VOCABULARY, ROOM = 128, 512, 64
SITES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
REPLAYS = 20


def config_of(sizes: dict[str, int], most: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["inner"], "num_attention_heads": sizes["hidden"] // HEAD, "head_dim": HEAD,
        "num_key_value_heads": sizes["kv"] // HEAD, "num_hidden_layers": 1, "vocab_size": VOCABULARY,
        "max_position_embeddings": most, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "dtype": "float16", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def online(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Return the records of a full rotation in 4 bit."""
    orders = {"qk": HEAD, "attn_out": sizes["hidden"] // HEAD, "mlp_mid": sizes["inner"]}
    records: list[dict[str, Any]] = []
    for site, order in orders.items():
        made = make_rotation("r4", order)
        assert made is not None
        factors = [[m, kind] for m, kind in made.factors]
        records.append(
            {
                "kind": "hadamard",
                "site": site,
                "order": order,
                "factors": factors,
                "block": made.block,
                "signs": None,
            }
        )
    clip = {"4": 0.9, "8": 1.0}
    records += [
        {"kind": "act_quant", "site": site, "bits": 4, "clip": clip, "symmetric": True} for site in SITES
    ]
    kv = {"kind": "kv_quant", "bits": {"k": 4, "v": 4}, "clip": {"k": clip, "v": clip}, "group": HEAD}
    return [*records, kv]


def write(folder: Path, sizes: dict[str, int], group: int, most: int) -> None:
    """Write an artifact of random weights."""
    noise, tensors = Noise(), []
    for name, k, n in linears(1, sizes["hidden"], sizes["inner"], sizes["kv"]):
        groups = 1 if group == -1 else k // group
        tensors += [
            (f"{name}.weight", "I32", (k // 16, 2 * n), noise.words(k // 16 * 2 * n)),
            (f"{name}.weight_scale", "F16", (groups, n), noise.scales(groups * n, k)),
        ]
    ones = torch.ones(sizes["hidden"], dtype=torch.float16).numpy().tobytes()
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    tensors += [(f"model.{norm}.weight", "F16", (sizes["hidden"],), ones) for norm in norms]
    shape = (VOCABULARY, sizes["hidden"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors.append((name, "F16", shape, noise.normal(shape[0] * shape[1], 1.0)))
    write_shard(folder / "model.safetensors", tensors)
    quant = {
        "quant_method": "w4pack", "artifact_version": 1, "layout": "marlin-16x64", "bits": 4,
        "group_size": group, "sym": True, "act_order": False, "modules_to_not_convert": ["lm_head"],
        "modules": {}, "online": online(sizes), "producer": {"name": "w4pack", "version": "0"},
    }  # fmt: skip
    config = {**config_of(sizes, most), "quantization_config": quant}
    (folder / "config.json").write_text(json.dumps(config))


def plain(sizes: dict[str, int], most: int) -> Any:
    """Return the fp16 block of random weights."""
    keys = {
        k: v for k, v in config_of(sizes, most).items() if k not in ("architectures", "model_type", "dtype")
    }
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**keys), dtype=torch.float16)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.eval()


def cache_name(model: Any) -> str:
    found = inspect.signature(inspect.unwrap(type(model.model).forward)).parameters
    return "cache" if "cache" in found else "past_key_values"


def timed(run: Callable[[], object]) -> float:
    """Return the median of replays of a captured call, in milliseconds."""
    graph, times = recorded(run), []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@torch.inference_mode()
def measure(model: Any, batch: int, tokens: int) -> Iterator[tuple[str, float]]:
    """Yield milliseconds and MiB of a model, with their names."""
    ids = torch.randint(VOCABULARY, (batch, tokens), device="cuda")
    name = cache_name(model)

    def prefill() -> object:
        return model(ids, use_cache=True, logits_to_keep=1)

    prefill()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits = model(ids, use_cache=True, logits_to_keep=1).logits
    assert bool(logits.isfinite().all())
    yield "prefill peak MiB", (torch.cuda.max_memory_allocated() - before) / 2**20
    yield "prefill ms", timed(prefill)
    tensors = {t.data_ptr(): t.nbytes for t in model.model.layers[0].state_dict().values()}
    yield "weights MiB", sum(tensors.values()) / 2**20
    cache = StaticCache(model.config, tokens + ROOM)
    model(ids, use_cache=True, logits_to_keep=1, **{name: cache})
    layer = cache.layers[0]
    yield "cache MiB", (layer.keys.nbytes + layer.values.nbytes) / 2**20
    one = ids[:, :1].contiguous()
    yield "decode ms", timed(lambda: model(one, use_cache=True, **{name: cache}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--group", type=int, default=-1)
    parser.add_argument("--bits", default="4,4", help="of activations and of the cache")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    need()
    sizes, most = TINY if given.tiny else SIZES, given.tokens + ROOM
    act, kv = (int(bits) for bits in given.bits.split(","))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}; group {given.group}, W4A{act}KV{kv} against fp16")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), sizes, given.group, most)
        ours = w4pack.load(folder, "cuda", act_bits=act, kv_bits=kv)
    stock = plain(sizes, most)
    for batch in (int(b) for b in given.batches.split(",")):
        print(f"batch {batch}, {given.tokens} tokens          ours        fp16   ratio", flush=True)
        for (name, mine), (_, other) in zip(
            measure(ours, batch, given.tokens), measure(stock, batch, given.tokens), strict=True
        ):
            print(f"  {name:20} {mine:11.3f} {other:11.3f} {other / mine:7.2f}", flush=True)


if __name__ == "__main__":
    main()
