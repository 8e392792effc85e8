"""The four calls most programs need: inspect, convert, verify, unpack.

    python examples/python_api.py SRC OUT

SRC is a folder with a 4-bit checkpoint (``examples/demo-gptq`` will do), OUT one that does not exist yet.
"""

import sys
from pathlib import Path

from w4pack.convert import convert, inspect, unpack, verify
from w4pack.convert.errors import W4PackError


def main(source: Path, out: Path) -> int:
    """Convert ``source`` to an artifact in ``out/artifact``, prove it, and unpack it to ``out/back``."""
    seen = inspect(source)
    print(f"{source}: {seen['format']}, {len(seen['layers'])} quantized linears")

    report = convert(source, out / "artifact", to="marlin")
    print(f"converted: lossless {report.lossless}")

    proof = verify(out / "artifact", against=source)
    print(f"verified: {proof['compared']} tensors compared, {len(proof['failures'])} differ")

    unpack(out / "artifact", out / "back")
    return 0 if proof["ok"] else 4


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except W4PackError as err:  # one class for everything a user can meet; it carries the exit code
        print(f"error: {err}", file=sys.stderr)
        sys.exit(err.exit_code)
