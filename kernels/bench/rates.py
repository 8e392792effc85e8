"""What a card can do at best: how fast it reads, how fast its matrix units multiply. The floor of a product.

Both rates are measured, not looked up: boards of one name differ, and a card that is warm is slower.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from w4pack.kernels.bench.timing import Candidate, Launcher, race, rotation

READ_BYTES = 4 << 30  # of the sweep; less on a card with less free memory
MATRIX_SIDES = ((8192, 8192, 8192), (1024, 4096, 14336))  # M, N, K of the library's products
REPEATS = 5
LONG_US = 6000.0  # microseconds of launches in a graph: the rate must be a sustained one


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured ceilings of a device.

    read        bytes a second, and by what it was reached
    operations  multiplications and additions a second in 16 bit, and by what
    """

    read: float
    read_by: str
    operations: float
    operations_by: str

    def floor(self, nbytes: int, operations: int) -> tuple[float, str]:
        """Return the least seconds for this much work, and what bounds it: ``bytes`` or ``operations``."""
        by_bytes, by_operations = nbytes / self.read, operations / self.operations
        return max((by_bytes, "bytes"), (by_operations, "operations"))


def measure(
    device: torch.device,
    dtype: torch.dtype,
    *,
    read_bytes: int = READ_BYTES,
    sides: tuple[tuple[int, int, int], ...] = MATRIX_SIDES,
) -> Rates:
    """Measure both rates: the best of several sweeps, the best of several products."""
    read, read_by = _read(device, read_bytes)
    best = max((_products(device, dtype, m, n, k), f"{m}x{n}x{k}") for m, n, k in sides)
    return Rates(read, read_by, best[0], f"{best[1]} {str(dtype).removeprefix('torch.')}")


def _read(device: torch.device, wanted: int) -> tuple[float, str]:
    """Return bytes a second of a sweep that only reads."""
    nbytes = min(wanted, _free(device) // 2) // 32768 * 32768
    values = torch.empty(nbytes // 4, dtype=torch.float32, device=device).uniform_(-1, 1)
    rows = values.view(-1, 8192)
    halves = values.view(torch.float16).view(-1, 16384)
    vector = torch.zeros(16384, dtype=torch.float16, device=device)
    sweeps: dict[str, Launcher] = {
        "sum": lambda i: values.sum(),
        "sum of rows": lambda i: rows.sum(1),
        "largest": lambda i: values.amax(),
        "matrix times vector": lambda i: halves @ vector,
    }
    name, microseconds = _best(sweeps, device)
    return nbytes / microseconds * 1e6, f"{name} over {nbytes / 2**30:.2f} GiB"


def _products(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> float:
    """Return operations a second of the library's matrix product, weights rotated."""
    x = torch.randn(m, k, device=device).to(dtype)
    sets = rotation(2 * n * k)
    weights = [(torch.randn(n, k, device=device) * k**-0.5).to(dtype) for _ in range(sets)]
    out = torch.empty(m, n, dtype=dtype, device=device)
    times = race(
        [Candidate("product", lambda i: torch.mm(x, weights[i].t(), out=out), sets, device)], REPEATS, LONG_US
    )
    return 2 * m * n * k / times["product"] * 1e6


def _best(runs: Mapping[str, Launcher], device: torch.device) -> tuple[str, float]:
    times = race([Candidate(name, run, 1, device) for name, run in runs.items()], REPEATS, LONG_US)
    return min(times.items(), key=lambda item: item[1])


def _free(device: torch.device) -> int:
    """Return bytes that can be allocated."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else READ_BYTES * 2
