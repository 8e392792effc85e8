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
    integers    the same of 8-bit integers, where they were measured: else 0
    """

    read: float
    read_by: str
    operations: float
    operations_by: str
    integers: float = 0.0
    integers_by: str = ""

    def floor(self, nbytes: int, operations: int, *, integers: bool = False) -> tuple[float, str]:
        """Return the least seconds for this much work, and what bounds it: ``bytes`` or ``operations``."""
        rate = self.integers if integers else self.operations
        by_bytes, by_operations = nbytes / self.read, operations / rate
        return max((by_bytes, "bytes"), (by_operations, "operations"))


def measure(
    device: torch.device,
    dtype: torch.dtype,
    *,
    integers: bool = False,
    read_bytes: int = READ_BYTES,
    sides: tuple[tuple[int, int, int], ...] = MATRIX_SIDES,
) -> Rates:
    """Measure the rates: the best of several sweeps, the best of several products.

    Args:
        device: to measure.
        dtype: of 16-bit products.
        integers: measure products of 8-bit integers too.
        read_bytes: of the sweep.
        sides: (M, N, K) of the products.
    """
    read, read_by = _read(device, read_bytes)

    def best(kind: torch.dtype) -> tuple[float, str]:
        rate, shape = max((_products(device, kind, m, n, k), f"{m}x{n}x{k}") for m, n, k in sides)
        return rate, f"{shape} {str(kind).removeprefix('torch.')}"

    return Rates(read, read_by, *best(dtype), *(best(torch.int8) if integers else (0.0, "")))


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
    sets = rotation(dtype.itemsize * n * k)
    x = _random(device, dtype, m, k)
    weights = [_random(device, dtype, n, k, k**-0.5) for _ in range(sets)]
    out = torch.empty(m, n, dtype=torch.int32 if dtype == torch.int8 else dtype, device=device)
    multiply = torch._int_mm if dtype == torch.int8 else torch.mm  # the one product of integers torch has
    times = race(
        [Candidate("product", lambda i: multiply(x, weights[i].t(), out=out), sets, device)], REPEATS, LONG_US
    )
    return 2 * m * n * k / times["product"] * 1e6


def _random(device: torch.device, dtype: torch.dtype, rows: int, k: int, scale: float = 1.0) -> torch.Tensor:
    """Return (rows, k): normal numbers times ``scale``, or integers over their whole range."""
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, k), dtype=dtype, device=device)
    made: torch.Tensor = (torch.randn(rows, k, device=device) * scale).to(dtype)
    return made


def _best(runs: Mapping[str, Launcher], device: torch.device) -> tuple[str, float]:
    times = race([Candidate(name, run, 1, device) for name, run in runs.items()], REPEATS, LONG_US)
    return min(times.items(), key=lambda item: item[1])


def _free(device: torch.device) -> int:
    """Return bytes that can be allocated."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else READ_BYTES * 2
