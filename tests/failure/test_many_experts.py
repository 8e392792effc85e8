"""F34 for mixtures of experts: thousands of small linears cost no more memory than a few large ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import builders as b

LIMIT = 256 << 10  # KiB above what the imports take
LAYERS, EXPERTS = 24, 64

# VmHWM is the high-water mark of the whole process, its imports included.
CHILD = """
import re, sys
from pathlib import Path
import w4pack.cli, numpy, w4pack.convert.command, w4pack.convert.answers
def kib(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
base = kib("VmRSS")
sys.argv = ["w4pack", *sys.argv[1:]]
code = 0
try:
    w4pack.cli.main()
except SystemExit as stop:
    code = stop.code or 0
print("PEAK", kib("VmHWM") - base, "CODE", code, file=sys.stderr)
"""


def peak_kib(*words: str | Path) -> int:
    """Run a command in a process of its own; return its peak above that of the imports."""
    line = [sys.executable, "-c", CHILD, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=600)
    found = re.search(r"PEAK (-?\d+) CODE (\d+)", done.stderr)
    assert found is not None, done.stderr[-3000:]
    assert found[2] == "0", (words, done.stdout[-2000:], done.stderr[-3000:])
    return int(found[1])


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 24 layers of 64 experts, 64 x 64 each: 4608 linears, 18432 tensors, about 13 MB."""
    config = b.qwen3_moe_config(
        hidden_size=64, moe_intermediate_size=64, num_experts=EXPERTS, num_hidden_layers=LAYERS,
        vocab_size=64, num_attention_heads=1, num_key_value_heads=1, num_experts_per_tok=4,
    )  # fmt: skip
    model = b.Model(config, b.skeleton(np.random.default_rng(60), config))
    rng = np.random.default_rng(61)
    drawn = [b.layer(rng, 64, 64, group=32, sym=False) for _ in range(16)]
    names = [f"model.layers.{i}.{name}" for i in range(LAYERS) for name in b.block_modules(config)]
    model.linears = {name: drawn[i % len(drawn)] for i, name in enumerate(names)}
    assert len(model.linears) == LAYERS * (3 * EXPERTS + 4)
    settings = b.gptq_config(group=32, sym=False, checkpoint_format="gptq_v2")
    return b.write(tmp_path_factory.mktemp("experts") / "src", model, b.gptq_v2, settings, shards=3)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["marlin", "compressed-tensors"])
def test_f34_peak_memory_with_many_small_experts(target: str, experts: Path, tmp_path: Path) -> None:
    peak = peak_kib("convert", experts, tmp_path / "out", "--to", target, "-q")
    assert peak <= LIMIT, f"{peak >> 10} MiB above the imports"


@pytest.mark.slow
def test_f34_the_other_commands_too(experts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    peak_kib("convert", experts, out, "--to", "marlin", "-q")
    peaks = {
        "verify": peak_kib("verify", out, "--against", experts, "-q"),
        "unpack": peak_kib("unpack", out, tmp_path / "back", "-q"),
        "inspect": peak_kib("inspect", experts, "--json"),
        "check": peak_kib("check", out, "--engine", "w4pack", "-q"),
    }
    assert max(peaks.values()) <= LIMIT, {name: f"{kib >> 10} MiB" for name, kib in peaks.items()}
