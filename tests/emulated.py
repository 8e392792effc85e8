"""Kernels of mma.sync run from their own source on a CPU: ``emulator`` has what a card's instructions do.

The code that launches a kernel on a card runs as it is, with tensors of the CPU; where it would start the
kernel, the host's C++ compiler makes it with the defines of the build, beside ``ptx.cuh`` and ``number.cuh`` of
the emulator instead of csrc's.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from w4pack.kernels import build, gemm_launch, launch, tiles
from w4pack.kernels.quarot import int_launch

HERE = Path(__file__).resolve().parent / "emulator"
COMPILER = shutil.which("g++") or shutil.which("clang++")
OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w")


@dataclass
class Machine:
    """A card of some blocks. ``late``: asynchronous copies come when they are waited for, not when asked."""

    arch: str
    late: bool
    seed: int
    multiprocessors: int = 4
    index: int = 0
    started: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sums = torch.empty(self.multiprocessors * tiles.SUMS_PER_MULTIPROCESSOR // 4)
        self._flags = torch.zeros(self.multiprocessors * tiles.FLAGS_PER_MULTIPROCESSOR, dtype=torch.int32)

    def workspace(self, stream: int) -> SimpleNamespace:
        """Return where blocks hand over sums, NaNs at first, and their flags."""
        self._sums.fill_(float("nan"))
        return SimpleNamespace(sums=self._sums.data_ptr(), flags=self._flags.data_ptr())

    def start(
        self, card: Any, entry: str, grid: int, threads: int, shared: int, stream: int, *given: Any
    ) -> None:
        """Run what ``launch.start`` starts on a card.

        Raises:
            AssertionError: the kernel used shared memory as it must not, stood still, or left a flag set.
        """
        self.started.append(entry)
        job = _jobs(self.arch)[entry]
        arguments = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_void_p(a) for a in given]
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        failure = _compiled(job)(grid, threads, shared, int(self.late), self.seed, pointers)
        assert failure is None, f"{entry}: {failure.decode()}"
        assert not bool(self._flags.any()), f"{entry}: flags are not zero again"


@contextmanager
def machine(arch: str, *, late: bool, seed: int) -> Iterator[Machine]:
    """Let products of CPU tensors run on an emulated card."""
    card = Machine(arch, late, seed)
    with (
        mock.patch.object(launch, "start", card.start),
        mock.patch.object(launch, "device", lambda index: card),
        mock.patch.object(torch.cuda, "current_device", lambda: -1),
        mock.patch.object(gemm_launch, "current_stream", lambda index: 0),
        mock.patch.object(int_launch.arguments, "current_stream", lambda index: 0),
    ):
        yield card


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins at a multiple of 256 bytes, as a card's allocator would have it."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.empty(size + 256, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@cache
def _jobs(arch: str) -> dict[str, build.Job]:
    return {job.entry: job for job in build.jobs(arch)}


@cache
def _sources() -> Path:
    """Return a folder with the kernels' sources beside the emulator's instructions."""
    folder = Path(tempfile.mkdtemp(prefix="w4pack-emulated-"))
    for path in (*build.SOURCES.glob("*.cu*"), *HERE.iterdir()):
        shutil.copy(path, folder / path.name)
    return folder


@cache
def _compiled(job: build.Job) -> Any:
    folder = _sources()
    library = folder / f"{job.entry}.so"
    given = [f'-DSOURCE="{job.source}"', *(f"-D{define}" for define in job.defines)]
    command = [str(COMPILER), *OPTIONS, *given, str(folder / "launch.cpp"), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    emulate = ctypes.CDLL(str(library)).emulate
    emulate.restype = ctypes.c_char_p
    return emulate
