"""What the tests of rows F1 to F23 share: small models, and conversions that must succeed or stop.

Beside every refusal stands the nearest case that must be accepted. Values come from the tests' own decoder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compare import same_numbers

import builders as b
import oracle
from oracle import Linear
from runner import Run, convert

PORTABLE = ("gptq", "awq", "compressed-tensors")
PACKED = ("marlin", *PORTABLE)
EVERY = (*PACKED, "dense")
ATTN = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


def small(**more: Any) -> dict[str, Any]:
    """Return the config with the fewest weights: k and v are 256 -> 64, the rest 256 -> 256."""
    return b.llama_config(**{"intermediate_size": 256, "num_key_value_heads": 1, "vocab_size": 64, **more})


def made(seed: int = 7, config: dict[str, Any] | None = None, **scheme: Any) -> b.Model:
    """Draw the small model."""
    return b.model(seed, config or small(), **scheme)


def accepted(source: Path, out: Path, to: str, want: dict[str, Linear], *options: str) -> Run:
    """Convert, and compare every module with what it should be."""
    done = convert(source, out, to, *options).expect(0)
    if to == "dense":
        tensors = oracle.read_folder(out)
        for name, linear in want.items():
            weight = tensors[f"{name}.weight"]
            assert oracle.same_floats(weight.array(), linear.weight(weight.tag), weight.tag), name
        return done
    got = oracle.decode_folder(out)
    assert set(got) == set(want)
    for name, linear in want.items():
        same_numbers(got[name], linear, name)
    return done


def refused(
    source: Path, out: Path, to: str, *said: object, code: int | tuple[int, ...] = 3, options: Any = ()
) -> Run:
    """Convert, and check that it stops before OUT exists, with the names and numbers that must be said."""
    done = convert(source, out, to, *options)
    codes = (code,) if isinstance(code, int) else code
    assert done.code in codes, done
    done.expect(done.code, *said)
    assert not out.exists()
    return done


def warnings_of(done: Run) -> str:
    """Return everything that warnings and plan say, as text."""
    return json.dumps([e for e in done.events if e["event"] in ("plan", "warning")])
