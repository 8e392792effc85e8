"""The compiler: NVRTC 12.9 of the package index, by way of ``ctypes``; and the assembler that belongs to it.

Needs no GPU, driver or toolkit.
"""

import ctypes
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

NVRTC_VERSION = (12, 9)
HINT = "pip install 'nvidia-cuda-nvrtc-cu12==12.9.*' 'nvidia-cuda-nvcc-cu12==12.9.*'"
# The assembler's notes that warpgroup products wait for one another: C7510 and more, one for each cause.
SERIALIZED = re.compile(r".*wgmma\S* instructions are serialized.*")
# No cache of the driver's, where there is one: what it holds comes without the log that tells of spills.
OPTIONS = ("--std=c++17", "--ptxas-options=-v", "--no-cache")
# Programmatic launch (ptx.cuh) in PTX, the one thing that sm_80 lacks of what code of sm_90 says by itself.
PROGRAMMATIC = re.compile(rb"\t// begin inline asm\n\tgriddepcontrol\.\w+;\n\t// end inline asm\n")
BEFORE_PROGRAMMATIC = ("sm_80", "compute_80")


class BuildError(Exception):
    """The compiler is missing or the wrong one, a source does not compile, or a hot kernel spills."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler gave: the code, its log, and the PTX on the way to machine code."""

    code: bytes
    log: str
    ptx: bytes = b""

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


PACKAGES = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvcc-cu12")


@cache
def identity() -> bytes:
    """Return what decides, beside a source and its defines, the code that this module makes of it."""
    versions = [_version_of(package) for package in PACKAGES]
    return repr(versions).encode() + Path(__file__).read_bytes()


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def nvrtc() -> ctypes.CDLL:
    """Return the compiler's library, from the package index's package.

    Raises:
        BuildError: it is not installed, or of another version: its PTX would not load on older drivers.
    """
    for library in _installed("cuda_nvrtc", "lib/libnvrtc.so.12"):
        loaded = ctypes.CDLL(str(library))
        _check_version(loaded)
        return loaded
    raise BuildError(f"the compiler nvidia-cuda-nvrtc-cu12 is not installed\n\nhint: {HINT}")


def _installed(package: str, file: str) -> Iterator[Path]:
    """Yield where a file of one of NVIDIA's packages is installed."""
    spec = importlib.util.find_spec(f"nvidia.{package}") if importlib.util.find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or () if spec else ():
        if (Path(folder) / file).is_file():
            yield Path(folder) / file


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


@cache
def assembler() -> Path:
    """Return the assembler's program, from the package index's package.

    Raises:
        BuildError: it is not installed, or of another version than the compiler, whose PTX it reads.
    """
    for program in _installed("cuda_nvcc", "bin/ptxas"):
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"release ([\d.]+)", said)
        expected = ".".join(map(str, NVRTC_VERSION))
        if version is None or version[1] != expected:
            found = version[1] if version else "unknown"
            raise BuildError(f"the assembler is {found}, expected {expected}\n\nhint: {HINT}")
        return program
    raise BuildError(f"the assembler nvidia-cuda-nvcc-cu12 is not installed\n\nhint: {HINT}")


def retarget(ptx: bytes, arch: str) -> bytes:
    """Return the PTX of a later architecture, up to sm_90a, for ``arch``: as the compiler makes it for sm_80,
    and as cards from sm_100 on take it (``build.PTX_OF``).
    """
    if arch in BEFORE_PROGRAMMATIC:
        ptx = PROGRAMMATIC.sub(b"", ptx)
    target = arch.replace("compute", "sm").encode()
    return re.sub(rb"(?m)^\.target \w+$", b".target " + target, ptx, count=1)


def assemble(ptx: bytes, arch: str) -> Compiled:
    """Make the machine code of PTX for ``arch``: that of a compile, which has the same assembler inside.

    Raises:
        BuildError: the assembler takes it not; with what it says.
    """
    with tempfile.TemporaryDirectory(prefix="w4pack-") as folder:
        source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_bytes(ptx.rstrip(b"\0"))
        command = [str(assembler()), "-v", f"-arch={arch}", str(source), "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise BuildError(run.stdout + run.stderr)
        return Compiled(made.read_bytes(), run.stderr, ptx)
