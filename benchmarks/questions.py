"""How fast `w4pack --help` and `w4pack inspect` answer: the latter on headers of 70B size (sparse files).

    python benchmarks/questions.py

Shapes of a 70B Llama, GPTQ 4 bit g128: 560 linears, 80 layers. Only headers, ``g_idx`` and zero points hold
data; the codes are holes in sparse files. Printed: best of five, beside the start of a bare interpreter.
"""

import json
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HIDDEN, INTERMEDIATE, KV, LAYERS, GROUP = 8192, 28672, 1024, 80, 128
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INTERMEDIATE),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}


def tensors(layer: int) -> list[tuple[str, str, tuple[int, ...], int, bytes]]:
    """(name, dtype, shape, size in bytes, data or nothing for a hole) of one layer."""
    made = []
    for name, (k, n) in SHAPES.items():
        p, g = f"model.layers.{layer}.{name}", k // GROUP
        zeros = np.full((g, n // 8), 0x77777777, np.uint32).tobytes()
        order = (np.arange(k, dtype=np.int32) // GROUP).tobytes()
        made += [
            (f"{p}.qweight", "I32", (k // 8, n), k // 2 * n, b""),
            (f"{p}.qzeros", "I32", (g, n // 8), len(zeros), zeros),
            (f"{p}.scales", "F16", (g, n), g * n * 2, b""),
            (f"{p}.g_idx", "I32", (k,), len(order), order),
        ]
    return made


def write(folder: Path) -> None:
    index: dict[str, str] = {}
    for layer in range(LAYERS):
        shard, header, at = f"part-{layer:02d}.safetensors", {}, 0
        for name, dtype, shape, size, _ in tensors(layer):
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            index[name] = shard
            at += size
        raw = json.dumps(header).encode()
        with (folder / shard).open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for *_, size, data in tensors(layer):
                if data:
                    file.write(data)
                else:
                    file.seek(size, 1)
            file.truncate(8 + len(raw) + at)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def best(*command: str, runs: int = 5) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        bare = best("-c", "pass")
        for label, *command in (
            ("--help", "-m", "w4pack", "--help"),
            ("inspect, 70B headers", "-m", "w4pack", "inspect", name),
            (
                "check --engine vllm, 70B headers",
                "-m",
                "w4pack",
                "check",
                name,
                "--engine",
                "vllm",
                "--tp",
                "1,2,4,8",
            ),
        ):
            taken = best(*command)
            print(
                f"{label:<34} {taken:5.2f} s   ({taken / bare:4.1f} x a bare interpreter, {bare:.3f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
