"""A Llama checkpoint of random weights on the disk, as GPTQ and as an artifact, both in the page cache.

Codes have zero mean and scales keep outputs as large as inputs (``randoms.py``), so that a forward pass stays
finite and two ways to load the weights can be compared by the token they give.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from randoms import CODE_RMS, GROUP, balanced_block
from synthetic import CONFIGS, linears, write_shard

from w4pack.convert import convert

Tensors = list[tuple[str, str, tuple[int, ...], bytes]]
SIZES = {"hidden": 4096, "inner": 14336, "kv": 1024, "layers": 32, "vocabulary": 128256}
TINY = {"hidden": 256, "inner": 512, "kv": 128, "layers": 2, "vocabulary": 512}
HEAD = 128


@contextlib.contextmanager
def checkpoints(where: Path | None, tiny: bool) -> Iterator[tuple[Path, Path]]:
    """Write a GPTQ checkpoint and its artifact, read both once, remove them at the end."""
    folder = Path(tempfile.mkdtemp(prefix="w4pack-start-", dir=where))
    try:
        source, artifact = folder / "gptq", folder / "artifact"
        write_gptq(source, TINY if tiny else SIZES)
        convert(source, artifact)
        for file in (*source.iterdir(), *artifact.iterdir()):
            warm(file)
        yield source, artifact
    finally:
        shutil.rmtree(folder)


def warm(file: Path) -> None:
    """Bring a file to the disk and into the page cache: later reads shall not meet the writing back."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        while opened.read(64 << 20):
            pass


def write_gptq(folder: Path, sizes: dict[str, int]) -> None:
    """Write a checkpoint: one shard for each layer, one for the rest."""
    folder.mkdir()
    noise = Noise()
    names: dict[str, str] = {}
    for layer in range(sizes["layers"] + 1):
        last = layer == sizes["layers"]
        tensors = rest_of(noise, sizes) if last else layer_of(noise, sizes, f"model.layers.{layer}")
        shard = f"model-{layer + 1:05}.safetensors"
        write_shard(folder / shard, tensors)
        names |= {tensor[0]: shard for tensor in tensors}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["inner"], "num_attention_heads": sizes["hidden"] // HEAD, "head_dim": HEAD,
        "num_key_value_heads": sizes["kv"] // HEAD, "num_hidden_layers": sizes["layers"],
        "vocab_size": sizes["vocabulary"], "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "float16",
        "bos_token_id": 0, "eos_token_id": 1, "quantization_config": CONFIGS["gptq"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


class Noise:
    """Bytes of random words and values, cut from blocks made once: eight billion draws would take minutes."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self._words = balanced_block(16 << 20)
        self._normal = rng.standard_normal(8 << 20, dtype=np.float32)
        self._uniform = rng.random(8 << 20, dtype=np.float32) + np.float32(0.5)
        self._turn = 0

    def words(self, count: int) -> bytes:
        return self._cut(self._words, count).tobytes()

    def normal(self, count: int, scale: float) -> bytes:
        return self._cut((self._normal * scale).astype(np.float16), count).tobytes()

    def scales(self, count: int, k: int) -> bytes:
        return (self._cut(self._uniform, count) / (CODE_RMS * k**0.5)).astype(np.float16).tobytes()

    def _cut(self, block: NDArray[Any], count: int) -> NDArray[Any]:
        """Return ``count`` values, from another place of the block each time."""
        self._turn += 1
        part = block[7919 * self._turn % (block.size // 2) :]
        return part[:count] if count <= part.size else np.resize(part, count)


def layer_of(noise: Noise, sizes: dict[str, int], base: str) -> Tensors:
    """Return a layer's tensors."""
    found: Tensors = []
    for name, k, n in linears(1, sizes["hidden"], sizes["inner"], sizes["kv"]):
        p, groups = name.replace("model.layers.0", base), k // GROUP
        zeros = np.full((groups, n // 8), 0x77777777, np.uint32).tobytes()  # stored as the midpoint less one
        found += [
            (f"{p}.qweight", "I32", (k // 8, n), noise.words(k // 8 * n)),
            (f"{p}.qzeros", "I32", (groups, n // 8), zeros),
            (f"{p}.scales", "F16", (groups, n), noise.scales(groups * n, k)),
            (f"{p}.g_idx", "I32", (k,), (np.arange(k, dtype=np.int32) // GROUP).tobytes()),
        ]
    ones = np.ones(sizes["hidden"], np.float16).tobytes()
    norms = ("input_layernorm", "post_attention_layernorm")
    return found + [(f"{base}.{norm}.weight", "F16", (sizes["hidden"],), ones) for norm in norms]


def rest_of(noise: Noise, sizes: dict[str, int]) -> Tensors:
    """Return embedding, last norm and head."""
    shape = (sizes["vocabulary"], sizes["hidden"])
    count = shape[0] * shape[1]
    ones = np.ones(shape[1], np.float16).tobytes()
    return [
        ("model.embed_tokens.weight", "F16", shape, noise.normal(count, 1.0)),
        ("model.norm.weight", "F16", shape[1:], ones),
        ("lm_head.weight", "F16", shape, noise.normal(count, shape[1] ** -0.5)),
    ]
