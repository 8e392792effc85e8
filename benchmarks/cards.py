"""The card that a benchmark times, asked for before anything is made: without one, no traceback.

python benchmarks/cards.py [DEVICE]      exit code 0: it is there; 2: it is not
"""

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

READ_RATE = 4.60e6  # bytes a microsecond, measured on an H200
MATRIX_RATE = 775e6  # operations a microsecond, the best sustained fp16 rate of cuBLAS there
INT8_RATE = 1957e6  # operations a microsecond of a bare loop of products there


def need(device: str = "cuda") -> "torch.device":
    """Return a device that torch sees, a card ready for launches; leave where there is none."""
    from w4pack.convert.errors import W4PackError
    from w4pack.kernels import devices
    from w4pack.kernels.bench import cards

    try:
        return cards.find(device) if device.startswith("cuda") else devices.find(device)
    except W4PackError as err:
        print(f"error: {err}", file=sys.stderr, flush=True)
        sys.exit(err.exit_code)


def need_in_children(device: str) -> None:
    """Leave where ``need`` would, without a context on the card: children whose start is timed do."""
    asked = subprocess.run([sys.executable, __file__, device], check=False)
    if asked.returncode:
        sys.exit(asked.returncode)


def environment() -> str:
    """Return card, driver, clock and torch's version."""
    import shutil

    import torch

    smi = torch.cuda.get_device_name()
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"]
        smi = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return f"{smi}; torch {torch.__version__}"


if __name__ == "__main__":
    need(*sys.argv[1:2])
