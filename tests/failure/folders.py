"""What the tests of rows F30 to F43 share: the small checkpoint, conversions that must succeed or stop."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

from compare import same_numbers

import builders as b
import oracle
from runner import Run, convert


def small(**more: Any) -> dict[str, Any]:
    """Return the config with the fewest weights."""
    return b.llama_config(**{"intermediate_size": 256, "num_key_value_heads": 1, "vocab_size": 64, **more})


def folder(path: Path, shards: int = 1, **more: Any) -> Path:
    """Write the small GPTQ checkpoint."""
    return b.write(path, b.model(30, small()), b.gptq, b.gptq_config(), shards=shards, **more)


def tree(path: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def refused(
    source: Path, out: Path, *said: object, code: int = 1, options: Any = (), to: str = "marlin"
) -> Run:
    """Convert; it must stop with this code and these words, leave no OUT, and leave the source alone."""
    before = tree(source) if source.is_dir() else {}
    done = convert(source, out, to, *options).expect(code, *said)
    assert not out.exists()
    assert (tree(source) if source.is_dir() else {}) == before
    return done


def accepted(source: Path, out: Path, *options: str, to: str = "marlin") -> Run:
    """Convert the small checkpoint and compare every module."""
    done = convert(source, out, to, *options).expect(0)
    want, got = b.model(30, small()).linears, oracle.decode_folder(out)
    assert set(got) == set(want)
    for name, linear in want.items():
        same_numbers(got[name], linear, name)
    return done


def with_header(text: bytes, data: bytes = b"") -> bytes:
    """Frame header bytes as a safetensors file."""
    return struct.pack("<Q", len(text)) + text + data
