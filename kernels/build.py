"""Build the GPU code: a table of (source, entry, architecture, defines) through NVRTC to cubins.

Runs on a machine with neither GPU nor driver nor toolkit: the compiler is the package
``nvidia-cuda-nvrtc-cu12`` 12.9, the assembler that of ``nvidia-cuda-nvcc-cu12`` 12.9. Compiled files and a
manifest go to ``kernels/cubins``; a file whose sources, options and compiler are unchanged is kept. A kernel
that spills registers, or whose warpgroup products the assembler serialized, fails the build.

Most of a compile's time goes into making PTX. Architectures have the same where a kernel has the same
defines: it is made once, and only assembled for the others.

    python -m w4pack.kernels.build [--arch sm_90a ...] [--jobs 2] [--only TEXT] [--tiles FILE]
"""

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

from w4pack.kernels import moe_tiles, tiles
from w4pack.kernels.compiler import (
    BuildError,
    Compiled,
    assemble,
    assembler,
    compile_source,
    identity,
    nvrtc,
    retarget,
)
from w4pack.kernels.manifest import CUBINS, Row, note, read_manifest, write_manifest, write_whole
from w4pack.kernels.quarot import int_moe_tiles, int_tiles, kv_tiles, quantize_plan
from w4pack.kernels.quarot.file import File

SOURCES = Path(__file__).resolve().parent / "csrc"
ALLOWED_SPILLS = int(os.environ.get("W4PACK_SPILLS", "0"))  # tuning may look at kernels that spill a little
FILES = Callable[[str], Iterable[File]]  # an architecture's
# Architectures have the same PTX where the defines are, but for what ``retarget`` changes: that of the first
# of these which is asked for. The compiler has one optimizer up to sm_90 and another from sm_100 on; later
# cards take what the first makes, too: it is what was tested on a card, and its code needs fewer registers.
ORDER = ("sm_90a", "sm_100", "sm_120", "sm_80", "compute_80")
PTX_OF = {"sm_100": "compute_90", "sm_120": "compute_90"}
QUAROT: tuple[FILES, ...] = (int_tiles.files, int_moe_tiles.files, kv_tiles.files, quantize_plan.files)


@dataclass(frozen=True, slots=True)
class Job:
    """One file to compile; ``hot`` kernels may not spill."""

    source: str
    entry: str
    arch: str
    defines: tuple[str, ...]
    hot: bool = True

    @property
    def suffix(self) -> str:
        """How the file's name ends."""
        return "ptx" if self.arch.startswith("compute") else "cubin"

    @property
    def path(self) -> str:
        """The file below ``cubins``."""
        return f"{self.arch}-{self.entry}.{self.suffix}"


def jobs(arch: str, extra: Iterable[tiles.Tile] = ()) -> Iterator[Job]:
    """Yield the files of one architecture; ``extra`` tiles are candidates for tuning."""
    yield Job("gather.cu", "gather", arch, (), hot=False)
    for bits in (4, 8):
        yield Job("repack.cu", f"repack_b{bits}", arch, (f"ENTRY=repack_b{bits}", f"BITS={bits}"), hot=False)
        for dtype in tiles.DTYPES:
            for zeros in (False, True):
                yield _dequantize(arch, dtype, bits, zeros)
                for tile in dict.fromkeys((*tiles.all_tiles(_table(arch), bits), *extra)):
                    yield _gemm(arch, tile, dtype, bits, zeros)
                for tile in dict.fromkeys((*moe_tiles.all_tiles(_table(arch), bits, zeros), *extra)):
                    if not tile.producer:
                        yield _moe(arch, tile, dtype, bits, zeros)
    for files in QUAROT:
        for file in files(arch):
            yield Job(file.source, file.entry, arch, file.defines, file.hot)


def _table(arch: str) -> str:
    return "sm_80" if arch == tiles.PTX_ARCH else arch


def _dequantize(arch: str, dtype: str, bits: int, zeros: bool) -> Job:
    entry = f"dequantize_{dtype}_b{bits}_{tiles.ZEROS[zeros]}"
    defines = (f"ENTRY={entry}", f"OUT_TYPE={dtype.upper()}", f"CODE_BITS={bits}", f"HAS_ZEROS={int(zeros)}")
    return Job("dequantize.cu", entry, arch, defines, hot=False)


def _gemm(arch: str, tile: tiles.Tile, dtype: str, bits: int, zeros: bool) -> Job:
    entry = tiles.kernel_name(tile, dtype, bits, zeros)
    defines = (*_of_tile(entry, tile, dtype, bits, zeros), *tile.shared_how)
    return Job(tiles.ENGINES[tile.engine], entry, arch, defines)


def _moe(arch: str, tile: tiles.Tile, dtype: str, bits: int, zeros: bool) -> Job:
    entry = moe_tiles.kernel_name(tile, dtype, bits, zeros)
    defines = (*_of_tile(entry, tile, dtype, bits, zeros), f"ENGINE={tile.engine.upper()}")
    return Job("moe.cu", entry, arch, defines)


def _of_tile(entry: str, tile: tiles.Tile, dtype: str, bits: int, zeros: bool) -> tuple[str, ...]:
    shape = (tile.tokens, tile.warps, tile.slots, tile.words, tile.unit, tile.stages)
    config = ",".join(map(str, (dtype.upper(), bits, int(zeros), *shape)))
    return (
        f"ENTRY={entry}",
        f"CONFIG={config}",
        f"BLOCKS={tile.blocks}",
        f"SHARED={tile.shared_bytes(bits, zeros)}",
    )


def compile_job(job: Job) -> Compiled:
    """Compile one file.

    Raises:
        BuildError: with the compiler's log.
    """
    try:
        made = compile_source(SOURCES / job.source, PTX_OF.get(job.arch, job.arch), job.defines)
    except BuildError as error:
        raise BuildError(f"{job.path} does not compile\n{error}") from None
    return _follow(job, made.ptx) if job.arch in PTX_OF else made


@cache
def _headers() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.cuh")))


def key_of(job: Job) -> str:
    """Return what decides the bytes of a file: sources, defines, compiler and how it is used."""
    parts = (
        _headers(),
        (SOURCES / job.source).read_bytes(),
        repr((job.arch, PTX_OF.get(job.arch), job.defines)).encode(),
        identity(),
    )
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def build(wanted: Sequence[Job], workers: int, out: Path = CUBINS) -> tuple[list[Row], list[str]]:
    """Compile what is not there yet; return a manifest row for each file, and what went wrong."""
    failures: list[str] = []
    one_writer = Lock()

    def make(jobs: Sequence[Job]) -> list[Row]:
        try:
            rows = _make(jobs, out)
        except BuildError as error:
            failures.append(str(error))
            for job in jobs:
                (out / job.path).unlink(missing_ok=True)  # of other sources: it may not be taken for these
            return []
        with one_writer:
            note(rows, out)
        return rows

    with ThreadPoolExecutor(workers) as pool:
        made = {
            str(row["path"]): row for rows in pool.map(make, of_one_compile(due(wanted, out))) for row in rows
        }
    kept = [  # read again: another build may have ended meanwhile
        row for row in read_manifest(out) if row["path"] not in made and (out / str(row["path"])).is_file()
    ]
    return sorted([*made.values(), *kept], key=lambda row: str(row["path"])), failures


def due(wanted: Iterable[Job], out: Path = CUBINS) -> list[Job]:
    """Return the files that are missing, of other sources or options, or not what their rows say."""
    known = {str(row["path"]): row for row in read_manifest(out)}
    return [job for job in wanted if not _is_there(job, known.get(job.path), out)]


def _is_there(job: Job, row: Row | None, out: Path) -> bool:
    if row is None or row["key"] != key_of(job) or not (out / job.path).is_file():
        return False
    if job.hot and int(str(row["spills"])) > ALLOWED_SPILLS:
        return False
    return hashlib.sha256((out / job.path).read_bytes()).hexdigest() == row["sha256"]


def of_one_compile(wanted: Sequence[Job]) -> list[list[Job]]:
    """Return the files in groups that one compile makes: the first's, and after it those made of its PTX."""
    groups: dict[tuple[object, ...], list[Job]] = {}
    for job in sorted(wanted, key=lambda job: ORDER.index(job.arch)):
        groups.setdefault((job.source, job.entry, job.defines), []).append(job)
    return list(groups.values())


def needs_assembler(groups: Iterable[Sequence[Job]]) -> bool:
    """Tell whether a group has a cubin that is not the compiler's."""
    return any(
        job.suffix == "cubin" and (job is not first or job.arch in PTX_OF)
        for first, *others in groups
        for job in (first, *others)
    )


def _make(jobs: Sequence[Job], out: Path) -> list[Row]:
    first, *others = jobs
    result = compile_job(first)
    results = [(first, result), *((job, _follow(job, result.ptx)) for job in others)]
    for job, made in results:
        if job.hot and made.spills > ALLOWED_SPILLS:
            raise BuildError(f"{job.path} spills {made.spills} bytes of registers")
        if made.serialized:
            raise BuildError(f"{job.path} has serialized warpgroup products\n{made.serialized}")
    return [_write(job, made, out) for job, made in results]


def _follow(job: Job, ptx: bytes) -> Compiled:
    """Make a file of another compile's PTX. What PTX takes of a card is known on the card: it has no log."""
    own = retarget(ptx, job.arch)
    try:
        return Compiled(own, "", own) if job.suffix == "ptx" else assemble(own, job.arch)
    except BuildError as error:
        raise BuildError(f"{job.path} cannot be assembled\n{error}") from None


def _write(job: Job, result: Compiled, out: Path) -> Row:
    write_whole(out / job.path, result.code)
    return {
        "path": job.path,
        "sha256": hashlib.sha256(result.code).hexdigest(),
        "bytes": len(result.code),
        "registers": result.registers,
        "spills": result.spills,
        "options": [f"-D{d}" for d in job.defines],
        "key": key_of(job),
    }


def prune(rows: list[Row], wanted: Sequence[Job], out: Path = CUBINS) -> list[Row]:
    """Delete what earlier builds left for these architectures and no table chooses; return the other rows."""
    paths = {job.path for job in wanted}
    stale = {f.name for arch in {job.arch for job in wanted} for f in out.glob(f"{arch}-*")} - paths
    for name in stale:
        (out / name).unlink()
    return [row for row in rows if row["path"] not in stale]


def read_tiles(path: str) -> list[tiles.Tile]:
    """Return the candidate tiles of a JSON list of rows, as in the tables."""
    try:
        return [tiles.Tile(str(row[0]), *map(int, row[1:])) for row in json.loads(Path(path).read_text())]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise argparse.ArgumentTypeError(f"{path} is no list of tiles: {error}") from None


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no number of compiles at a time")
    return int(text)


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text else None
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text} is no regular expression: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m w4pack.kernels.build", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--arch", nargs="+", choices=ORDER, default=[*tiles.ARCHES, tiles.PTX_ARCH])
    parser.add_argument("--jobs", type=_jobs, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=_pattern, help="only entries that match this regular expression")
    parser.add_argument(
        "--tiles",
        type=read_tiles,
        default=[],
        help="JSON list of candidate tiles to build besides the tables'",
    )
    options = parser.parse_args(arguments)
    wanted = [job for arch in options.arch for job in jobs(arch, options.tiles)]
    wanted = [job for job in wanted if not options.only or options.only.search(job.entry)]
    try:
        groups = of_one_compile(due(wanted))
        if groups:
            nvrtc()
        if needs_assembler(groups):
            assembler()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    begun = time.monotonic()
    rows, failures = build(wanted, options.jobs)
    taken = time.monotonic() - begun
    if not options.only:
        rows = prune(rows, wanted)
    write_manifest(rows)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    megabytes = sum(int(str(row["bytes"])) for row in rows) / 1e6
    print(f"{len(wanted)} files wanted, {len(rows)} present, {megabytes:.1f} MB")
    print(f"{sum(map(len, groups))} were to be made: {taken:.0f} s with {options.jobs} at a time")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
