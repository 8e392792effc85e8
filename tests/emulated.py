"""Kernels without wgmma run from their own source on a CPU: ``emulator`` has what a card's instructions do.

The code that launches a kernel on a card runs as it is, with tensors of the CPU. Where it would start the
kernel, the host's C++ compiler makes it with the defines of the build, beside the emulator's files of
instructions instead of csrc's.
"""

import ctypes
import hashlib
import itertools
import os
import re
import shutil
import stat
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from w4pack.kernels import build, gemm_launch, launch, moe_launch, ops, tiles
from w4pack.kernels.quarot import int_launch, kv_launch, orders_int, quantize_launch, quantize_plan

HERE = Path(__file__).resolve().parent / "emulator"
COMPILER = shutil.which("g++") or shutil.which("clang++")
OPTIONS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w")
DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];")
ROOM = {"sm_80": 163, "sm_90a": 227, "sm_100": 227, "sm_120": 99}  # KiB of shared memory of a block


EPSILON = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a step of a result, relative to it
INTEGER_KINDS = [
    (order, grouped)
    for order in (orders_int.P32, orders_int.Q32, orders_int.S64)
    for grouped in (False, True)
]


def of_all_cards(tiles_of: Callable[[str, Any], Iterable[tiles.Tile]], kinds: Iterable[Any]) -> list[Any]:
    """Return (tile, kind, arch) of every mma tile, once."""
    found: dict[tuple[tiles.Tile, Any], str] = {}
    for arch, kind in itertools.product(tiles.ARCHES, kinds):
        for tile in tiles_of(arch, kind):
            if tile.engine == "mma":
                found.setdefault((tile, kind), arch)
    return [pytest.param(*key, arch, id=f"{arch}-{key[0].text}-{key[1]}") for key, arch in found.items()]


class _Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_uint64))


_tensors: dict[int, _Range] = {}  # what ``aligned`` made and somebody still has
_keys = itertools.count()


@dataclass
class Machine:
    """A card of some blocks.

    late     asynchronous copies come when they are waited for, not when they are asked for
    seed     of the order in which threads run
    started  the kernels, in their order
    """

    arch: str
    late: bool
    seed: int
    multiprocessors: int = 4
    index: int = 0
    started: list[str] = field(default_factory=list)

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        return ROOM[self.arch] << 10

    def __post_init__(self) -> None:
        self._sums = torch.empty(self.multiprocessors * tiles.SUMS_PER_MULTIPROCESSOR // 4)
        self._kept: list[torch.Tensor] = []
        self._marked = torch.full(
            (self.multiprocessors * tiles.MARKED_PER_MULTIPROCESSOR // 4,), -1, dtype=torch.int32
        )
        self._flags = torch.zeros(self.multiprocessors * tiles.FLAGS_PER_MULTIPROCESSOR, dtype=torch.int32)

    def workspace(self, stream: int) -> SimpleNamespace:
        """Return where blocks hand over sums, NaNs at first, or are marked, and their flags."""
        self._sums.fill_(float("nan"))
        addresses = (t.data_ptr() for t in (self._sums, self._marked, self._flags))
        return SimpleNamespace(**dict(zip(("sums", "marked", "flags"), addresses, strict=True)))

    def start(
        self,
        card: Any,
        entry: str,
        grid: int | tuple[int, int],
        threads: int,
        shared: int,
        stream: int,
        *given: Any,
    ) -> None:
        """Run what ``launch.start`` starts on a card.

        Raises:
            AssertionError: the kernel used shared memory as it must not, stood still, or left a flag set or a
                place without its mark.
        """
        self.started.append(entry)
        job = _jobs(self.arch)[entry]
        arguments = [a if isinstance(a, ctypes._SimpleCData) else ctypes.c_void_p(a) for a in given]
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        grids = grid if isinstance(grid, tuple) else (grid, 1)
        ranges = [*_tensors.values()]
        known = (_Range * len(ranges))(*ranges)
        failure = _compiled(job)(
            *grids, threads, shared, int(self.late), self.seed, pointers, known, len(ranges)
        )
        assert failure is None, f"{entry}: {failure.decode()}"
        assert not bool(self._flags.any()), f"{entry}: flags are not zero again"
        assert bool((self._marked == -1).all()), f"{entry}: places are not marked again"

    def _keep(self, table: np.ndarray) -> torch.Tensor:
        self._kept.append(aligned(torch.from_numpy(table)))
        return self._kept[-1]

    def fragments_of(self, task: quantize_launch.Task, form: quantize_plan.Tiled, index: int) -> int:
        """Return the address of a transform's table, as ``quantize_launch`` keeps it on a card."""
        found = quantize_plan.dense(task.transform, task.heads, task.size, ROOM[self.arch] << 10)
        assert found is not None
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[task.x.dtype]
        return self._keep(quantize_plan.fragments(task.transform, form, found[1], name)).data_ptr()

    def tables(self, transform: Any, size: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tables of the general transform."""
        entries, words = map(self._keep, quantize_plan.any_tables(transform, size))
        return entries, words

    def signs(self, transform: str, index: int) -> torch.Tensor:
        """Return the signs of a transform of heads."""
        return self._keep(kv_launch.sign_words(transform))


@contextmanager
def machine(arch: str, *, late: bool, seed: int, multiprocessors: int = 4) -> Iterator[Machine]:
    """Let operators' launches run on an emulated card, with CPU tensors that ``aligned`` made."""
    card = Machine(arch, late, seed, multiprocessors)
    with (
        mock.patch.object(launch, "start", card.start),
        mock.patch.object(launch, "device", lambda index: card),
        mock.patch.object(torch.cuda, "current_device", lambda: -1),
        mock.patch.object(gemm_launch, "current_stream", lambda index: 0),
        mock.patch.object(moe_launch, "current_stream", lambda index: 0),
        mock.patch.object(ops, "current_stream", lambda index: 0),
        mock.patch.object(int_launch.arguments, "current_stream", lambda index: 0),
        mock.patch.object(torch.cuda, "device", lambda index: nullcontext()),
        mock.patch.object(quantize_launch, "_shared_of_multiprocessor", lambda index: card.shared + 1024),
        mock.patch.object(quantize_launch, "_fragments_of", card.fragments_of),
        mock.patch.object(quantize_launch, "_tables", card.tables),
        mock.patch.object(kv_launch, "_signs", card.signs),
    ):
        yield card


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins at a multiple of 256 bytes, as a card's allocator would have it."""
    size = tensor.numel() * tensor.element_size()
    memory = torch.empty(size + 256, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    made = memory[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    key = next(_keys)
    _tensors[key] = _Range(made.data_ptr(), size)
    weakref.finalize(made, _tensors.pop, key)
    return made


@cache
def _jobs(arch: str) -> dict[str, build.Job]:
    return {job.entry: job for job in build.jobs(arch)}


@cache
def _sources() -> Path:
    """Return a folder with the kernels' sources beside the emulator's instructions; processes share it."""
    paths = [*build.SOURCES.glob("*.cu*"), *HERE.glob("*.cu*"), *HERE.glob("*.h"), *HERE.glob("*.cpp")]
    # A block's own memory instead of one array for all.
    memory = r"\n#define \2 (reinterpret_cast<\1 *>(machine::dynamic_memory()))\n"
    texts = {path.name: DYNAMIC.sub(memory, path.read_text()) for path in paths}
    version = subprocess.run([str(COMPILER), "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(repr((sorted(texts.items()), version, OPTIONS)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"w4pack-emulated-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and found.st_mode & 0o077 == 0
    assert own, f"{folder}: expected a folder of mode 0700 of this user; delete it, or set TMPDIR"
    for name, text in texts.items():
        _put(folder / name, lambda made, text=text: made.write_text(text))
    return folder


def _put(path: Path, make: Callable[[Path], object]) -> None:
    """Make a file that is there as a whole or not at all."""
    if not path.exists():
        made = path.with_name(f"{path.name}.{os.getpid()}")
        make(made)
        made.replace(path)


@cache
def _compiled(job: build.Job) -> Any:
    folder = _sources()
    defines = [*job.defines, f"EMULATED={job.entry}", f'SOURCE="{job.source}"']
    library = folder / f"{hashlib.sha256(repr(defines).encode()).hexdigest()[:24]}.so"

    def compile_to(made: Path) -> None:
        given = [f"-D{define}" for define in defines]
        command = [str(COMPILER), *OPTIONS, *given, str(folder / "launch.cpp"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]

    _put(library, compile_to)
    emulate = ctypes.CDLL(str(library)).emulate
    emulate.restype = ctypes.c_char_p
    return emulate
