"""What `w4pack convert --quantize gptq` makes of a 16-bit model, as stock engines load it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cases import PORTABLE, RUNS, Case, Shelf, as_checked

from w4pack.convert import convert
from w4pack.convert.planning.quantize_options import QuantizeOptions

SIZES: dict[str, Any] = {  # what the kernels of vLLM's CPU build take
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROTATIONS = {"none": "plain", "offline": "rotated"}


def quantized(shelf: Shelf) -> Iterator[Case]:
    """Return one small model, quantized to each portable target, for each engine that can run it here."""
    from quantize import sources

    source = sources.save(sources.llama(**SIZES), shelf.root / "quantized" / "source")
    text = sources.text(shelf.root / "quantized" / "book.txt")
    for rotate, word in ROTATIONS.items():
        for target in PORTABLE:
            out = shelf.root / "quantized" / f"{word}-{target}"
            asked = QuantizeOptions(
                group_size=32, sym=target != "awq", calibration=str(text), samples=8, seqlen=64
            )
            convert(source, out, to=target, rotate=rotate, quantize=asked)
            for engine, runs in RUNS.items():
                if runs(out):
                    yield as_checked(f"{engine}-quantized-{word}-{target}", engine, out, out)
