"""Brings the tensors of files to a device at the speed of the bus: executes the plan of ``placement``.

``load_tensors`` loads what targets say of an artifact, ``load_file`` ordinary safetensors files. One
allocation holds what comes from one file, tensors are views of it, and nothing is copied a second time or
repacked. Where anything fails, nothing half filled is returned.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.utils.dlpack import from_dlpack

from w4pack.convert.errors import SourceError, W4PackError
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.tensorfile import TensorInfo, read_header
from w4pack.kernels import devices, hashes
from w4pack.kernels.artifact import Artifact
from w4pack.kernels.chunks import CHUNK, Chunk
from w4pack.kernels.movers import SLOTS, CudaMover, HostMover, Mover
from w4pack.kernels.placement import Plan, Target, make_plan, rest
from w4pack.kernels.workers import Files, Run, WeightFile

MAX_THREADS = 8  # by default; more gain little (12: 2 %) and cost page-locked memory
MAX_STAGING = 256 << 20  # bytes of page-locked memory

DTYPES: dict[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip

EXCHANGED = (torch.int32, torch.float16, torch.bfloat16, torch.float32)  # what every DLPack has


def load_tensors(
    artifact: Artifact,
    targets: Mapping[str, Target],
    device: torch.device | str,
    *,
    threads: int | None = None,
    check_hashes: bool = False,
) -> dict[str, torch.Tensor]:
    """Load targets made of an artifact's tensors. Returns key -> tensor.

    check_hashes  first compare every tensor that is used with the sha256 in ``w4pack.json``, not a sample
                  alone; reads the files once more, at about 1.2 GB/s a core
    Raises as ``execute``; SourceError that names every tensor whose bytes are not those that were written;
    VerifyError that names every one that has another one's.
    """
    if check_hashes:
        hashes.check(artifact, {p.name for t in targets.values() for p in t.parts}, threads)
    with ThreadPoolExecutor(1) as beside:  # while all of it is read
        checked = beside.submit(hashes.check_samples, artifact)
        found = execute(make_plan(targets), artifact.files, device, threads=threads)
        hashes.tell(checked.result())
    return found


def load_file(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", *, threads: int | None = None
) -> dict[str, torch.Tensor]:
    """Load a safetensors file, or all safetensors files of a model's folder. Returns name -> tensor.

    The counterpart of ``safetensors.torch.load_file`` for any checkpoint. Raises SourceError for what is no
    safetensors file, else as ``execute``.
    """
    tensors, files = file_tensors(path)
    return execute(make_plan(rest(tensors, ())), files, device, threads=threads)


def file_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, TensorInfo], Files]:
    """Return the tensors of a safetensors file or of a model's folder, and the files, from headers alone."""
    return _folder(path) if Path(path).is_dir() else _single(Path(path))


def _folder(path: str | os.PathLike[str]) -> tuple[dict[str, TensorInfo], Files]:
    with LocalStore(path) as store, open_checkpoint(store) as checkpoint:
        pickles = [name for name in checkpoint.weight_files if not name.endswith(".safetensors")]
        if pickles:
            where, expected = store.path_of(pickles[0]), "*.safetensors"
            raise SourceError(
                "not a safetensors file", code="not-safetensors", where=where, expected=expected
            )
        files = {name: (store.path(name), store.files()[name]) for name in checkpoint.weight_files}
        return dict(checkpoint.tensors), files


def _single(path: Path) -> tuple[dict[str, TensorInfo], Files]:
    name = str(path)
    with WeightFile(path) as file:
        header = read_header(name, file.size, file.read)
        return {info.name: info for info in header.tensors}, {name: (path, file.size)}


def execute(
    plan: Plan, files: Files, device: torch.device | str, *, threads: int | None = None, chunk: int = CHUNK
) -> dict[str, torch.Tensor]:
    """Load what a plan places. Returns key -> tensor.

    files    where the plan's files are; a file of another size than its header was read with is refused
    threads  default: cores, at most 8
    chunk    bytes of a staging buffer, as the plan was made with
    Raises SourceError with file and offset for a file that is missing, changed or cannot be read; W4PackError
    where the device has not enough memory, or torch no such dtype; UsageError for a device that is not there.
    """
    device = devices.find(device)
    for key, place in plan.places.items():
        torch_dtype(place.dtype, key)
    with _opened(plan.chunks, files) as opened:
        arenas = _allocate(plan, device)
        _run(plan.chunks, opened, arenas, threads, chunk)
    with torch.cuda.device(
        -1 if device.index is None else device.index
    ):  # torch exchanges what is on the current card
        return _views(plan, arenas)


def carry(
    chunks: Sequence[Chunk],
    files: Files,
    arenas: Sequence[torch.Tensor],
    *,
    threads: int | None = None,
    chunk: int = CHUNK,
) -> None:
    """Read chunks and copy them to where they go: arenas, uint8, on one device. All else as ``execute``."""
    with _opened(chunks, files) as opened:
        _run(chunks, opened, arenas, threads, chunk)


@contextmanager
def _opened(chunks: Sequence[Chunk], files: Files) -> Iterator[dict[str, WeightFile]]:
    """Open the files that chunks read: one that is missing or changed is found before anything is moved."""
    with ExitStack() as stack:
        used = dict.fromkeys(item.file for item in chunks)
        yield {name: stack.enter_context(WeightFile(*files[name])) for name in used}


def _run(
    chunks: Sequence[Chunk],
    opened: Mapping[str, WeightFile],
    arenas: Sequence[torch.Tensor],
    threads: int | None,
    chunk: int,
) -> None:
    Run(chunks, opened, _movers(arenas, _thread_count(threads, len(chunks), chunk), chunk)).go()


def _thread_count(asked: int | None, chunks: int, chunk: int) -> int:
    """Return how many threads: as asked or the cores; no more than chunks, or than staging memory allows."""
    cores = len(os.sched_getaffinity(0))
    wanted = min(cores, MAX_THREADS) if asked is None else asked
    return min(max(1, min(wanted, MAX_STAGING // (SLOTS * chunk))), chunks)


def _allocate(plan: Plan, device: torch.device) -> list[torch.Tensor]:
    try:
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in plan.arenas]
    except torch.cuda.OutOfMemoryError as err:
        free = torch.cuda.mem_get_info(device)[0]
        raise W4PackError(
            "not enough memory on the device",
            code="device-memory",
            where=str(device),
            expected=f"{sum(plan.arenas):,} bytes",
            found=f"{free:,} bytes free",
        ) from err


def _movers(arenas: Sequence[torch.Tensor], count: int, chunk: int) -> list[Mover]:
    device = arenas[0].device
    if device.type == "cpu":
        return [HostMover(arenas, chunk) for _ in range(count)]
    # The allocator may hand out memory that kernels on the caller's stream still use: copies wait for them.
    after = torch.cuda.current_stream(device).record_event()
    return [CudaMover(arenas, chunk, after) for _ in range(count)]


def torch_dtype(tag: str, key: str) -> torch.dtype:
    """Return torch's dtype of a safetensors tag. Raises W4PackError, naming ``key``, if there is none."""
    dtype = getattr(torch, DTYPES.get(tag, ""), None)
    if not isinstance(dtype, torch.dtype):
        known = ", ".join(DTYPES)
        raise W4PackError("torch has no such dtype", code="no-dtype", where=key, expected=known, found=tag)
    return dtype


def _views(plan: Plan, arenas: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors as views: a few calls each, because there may be 100,000.

    Each has a storage of its own, which is a part of the arena and keeps it: ``torch.save`` writes whole
    storages, and refuses one that is seen with two dtypes.
    """
    typed: dict[tuple[int, str], torch.Tensor] = {}
    tensors = {}
    for key, (arena, offset, tag, shape) in plan.places.items():
        whole = typed.get((arena, tag))
        if whole is None:
            whole = typed[arena, tag] = arenas[arena].view(torch_dtype(tag, key))
        view = whole.as_strided(shape, _strides(shape), offset // whole.element_size())
        tensors[key] = from_dlpack(view.__dlpack__()) if view.dtype in EXCHANGED and view.numel() else view
    return tensors


def _strides(shape: Sequence[int]) -> list[int]:
    strides, size = [1] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = size
        size *= max(shape[dim], 1)
    return strides
