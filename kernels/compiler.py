"""The compiler: NVRTC 12.9 of the package index, by way of ``ctypes``. Needs no GPU, driver or toolkit."""

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NVRTC_VERSION = (12, 9)
HINT = "pip install 'nvidia-cuda-nvrtc-cu12==12.9.*'"
# The assembler's notes that warpgroup products wait for one another: C7510 and more, one for each cause.
SERIALIZED = re.compile(r".*wgmma\S* instructions are serialized.*")
OPTIONS = ("--std=c++17", "--ptxas-options=-v")


class BuildError(Exception):
    """The compiler is missing or the wrong one, a source does not compile, or a hot kernel spills."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler gave: the code, its log, and the PTX on the way to machine code."""

    code: bytes
    log: str
    ptx: bytes = b""

    @property
    def portable(self) -> "Compiled":
        """The PTX as a file of its own. What it takes of a card is known on the card alone: it has no log."""
        return Compiled(self.ptx, "")

    @property
    def registers(self) -> int:
        """Registers of a thread (0 for PTX)."""
        found = re.search(r"Used (\d+) registers", self.log)
        return int(found[1]) if found else 0

    @property
    def spills(self) -> int:
        """Bytes of spill stores and loads."""
        return sum(map(int, re.findall(r"(\d+) bytes spill", self.log)))

    @property
    def serialized(self) -> str:
        """What the assembler says where warpgroup products wait for one another; else nothing."""
        return "\n".join(SERIALIZED.findall(self.log))


@cache
def nvrtc() -> ctypes.CDLL:
    """Return the compiler's library, from the package index's package.

    Raises:
        BuildError: it is not installed, or of another version: its PTX would not load on older drivers.
    """
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or () if spec else ():
        library = Path(folder) / "lib" / "libnvrtc.so.12"
        if library.is_file():
            loaded = ctypes.CDLL(str(library))
            _check_version(loaded)
            return loaded
    raise BuildError(f"the compiler nvidia-cuda-nvrtc-cu12 is not installed\n\nhint: {HINT}")


def _check_version(library: ctypes.CDLL) -> None:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != NVRTC_VERSION:
        raise BuildError(f"the compiler is {major.value}.{minor.value}, expected 12.9\n\nhint: {HINT}")


def compile_source(source: Path, arch: str, defines: Sequence[str]) -> Compiled:
    """Compile one source for an architecture, sm_* or compute_*; it may include what lies beside it.

    Raises:
        BuildError: it does not compile; with the compiler's log.
    """
    library, program = nvrtc(), ctypes.c_void_p()
    text = source.read_bytes()
    library.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    options = [f"--gpu-architecture={arch}", f"-I{source.parent}", *OPTIONS, *(f"-D{d}" for d in defines)]
    array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    try:
        failed = library.nvrtcCompileProgram(program, len(options), array)
        log = _buffer(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if failed:
            raise BuildError(log)
        ptx = _buffer(program, "PTX")
        return Compiled(ptx if arch.startswith("compute") else _buffer(program, "CUBIN"), log, ptx)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _buffer(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc(), f"nvrtcGet{what}")(program, data)
    return data.raw
