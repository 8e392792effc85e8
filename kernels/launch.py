"""Devices, kernels and launches: what must be ready before a kernel can start, kept once it is.

Everything that costs time (reading a cubin, a kernel's attributes, a workspace) happens at the first call
for a device, or in ``prepare``; a launch afterwards is a look-up and one call of cuda-core.
"""

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4pack.convert.errors import UsageError, extra_missing, installed
from w4pack.kernels import tiles

if TYPE_CHECKING:
    from torch import Tensor

CUBINS = Path(__file__).resolve().parent / "cubins"
MUCH_SHARED = 16 << 10  # bytes of a block from which a kernel is taken to have no use for the L1
CUDA_CORE = ("running on a GPU", ("cuda-core",), "gpu")
SPARE_WORKSPACES = 1  # made with the first one: a stream met during a graph capture cannot allocate
# (32 MB each on 132 multiprocessors: loading may need 64 MiB beside the tensors; later ones are the driver's)
_lock = threading.Lock()
_devices: dict[int, "Device"] = {}
_devices_lock = threading.Lock()


class _Thread(threading.local):
    """A thread, and whether a card's context is known to be its own."""

    entered = False


_thread = _Thread()


class _Raw:
    """A stream handle of torch in the form cuda-core takes."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


@dataclass(slots=True)
class Workspace:
    """Addresses of what blocks hand over to one another.

    sums     of any value between launches
    marked   sums that are their own flags: all bits set between launches
    flags    zero between launches
    """

    sums: int
    marked: int
    flags: int
    memory: tuple["Tensor", ...] = ()  # what holds them, where that is torch's


@dataclass(slots=True)
class Device:
    """One card: its cubins' architecture, loaded kernels, stream objects and workspaces.

    ``shared``: bytes of shared memory that a block may have.
    """

    index: int
    core: Any
    arch: str
    multiprocessors: int
    shared: int
    kernels: dict[tuple[str, int], Any] = field(default_factory=dict)
    streams: dict[int, Any] = field(default_factory=dict)
    workspaces: dict[int, Workspace] = field(default_factory=dict)
    spare: list[Workspace] = field(default_factory=list)
    maps: dict[tuple[object, ...], Any] = field(default_factory=dict)
    weight_maps: dict[tuple[object, ...], tuple[Any, Any]] = field(default_factory=dict)

    @property
    def programmatic(self) -> bool:
        """Whether kernels may start before the previous one has finished."""
        return self.arch != "sm_80" and self.arch != tiles.PTX_ARCH

    def enter(self) -> None:
        """Make the card's context that of this thread; the card is torch's current one.

        Torch does so with its own first work in a thread, and takes a device for current before that. What
        the driver is asked for needs the context at once.
        """
        self.core.set_current()
        _thread.entered = True

    def kernel(self, entry: str, shared: int = 0) -> Any:
        """Return a kernel, loaded and told how much shared memory it will use."""
        found = self.kernels.get((entry, shared))
        if found is None:
            found = self.kernels[entry, shared] = _load(self, entry, shared)
        return found

    def stream(self, handle: int) -> Any:
        """Return the cuda-core object of a raw stream handle."""
        found = self.streams.get(handle)
        if found is None:
            found = self.streams[handle] = self.core.create_stream(_Raw(handle))
        return found

    def workspace(self, handle: int) -> Workspace:
        """Return the workspace of a stream: kernels of one stream do not meet, those of two might."""
        found = self.workspaces.get(handle)
        if found is None:
            with _lock:
                found = self.workspaces.get(handle)  # one that was replaced would be freed while in use
                if found is None:
                    found = self.workspaces[handle] = (
                        self.spare.pop() if self.spare else _late_workspace(self)
                    )
        return found


def device(index: int) -> Device:
    """Return a card, ready for launches.

    Raises:
        UsageError: the card is older than sm_80, or cuda-core is missing.
    """
    found = _devices.get(index)
    if found is None:
        with _devices_lock:  # a second one would hand out other workspaces for the same streams
            found = _devices.get(index)
            if found is None:
                found = _devices[index] = _make_device(index)
    return found


def _make_device(index: int) -> Device:
    import torch

    capability = torch.cuda.get_device_capability(index)
    arch = supported_arch(capability, f"cuda:{index}")
    core = _core().Device(index)
    properties: Any = torch.cuda.get_device_properties(index)
    with torch.cuda.device(index):
        core.set_current()
        room = properties.shared_memory_per_block_optin
        found = Device(index, core, arch, properties.multi_processor_count, room)
        found.spare = [_make_workspace(found) for _ in range(1 + SPARE_WORKSPACES)]
    return found


def supported_arch(capability: tuple[int, int], where: str) -> str:
    """Return whose files a card runs.

    Raises:
        UsageError: the card is below sm_80.
    """
    arch = tiles.arch_of(capability)
    if arch is None:
        raise UsageError(
            "the card is too old for the kernels",
            code="card-too-old",
            where=where,
            expected="compute capability 8.0 or later",
            found=f"{capability[0]}.{capability[1]}",
            hint="the model runs on the CPU: --device cpu",
        )
    return arch


def table_arch(arch: str) -> str:
    """Return whose tile table serves an architecture: PTX is built of sm_80's."""
    return "sm_80" if arch == tiles.PTX_ARCH else arch


def check_installed() -> None:
    """Look for what launches need, without importing it: for processes that fork before they use a card.

    Raises:
        UsageError: cuda-core is missing.
    """
    if not installed("cuda.core"):
        raise extra_missing(*CUDA_CORE)


def _core() -> Any:
    try:
        import cuda.core

        return cuda.core
    except ImportError as error:
        raise extra_missing(*CUDA_CORE) from error


def _load(card: Device, entry: str, shared: int) -> Any:
    suffix = "ptx" if card.arch == tiles.PTX_ARCH else "cubin"
    path = CUBINS / f"{card.arch}-{entry}.{suffix}"
    if not path.is_file():
        raise UsageError(
            "a compiled kernel is missing",
            code="kernel-missing",
            where=f"kernels/cubins/{path.name}",
            hint="in a source checkout build them once: make kernels",
        )
    code = _core().ObjectCode
    module = code.from_ptx(path.read_bytes()) if suffix == "ptx" else code.from_cubin(path.read_bytes())
    kernel = module.get_kernel(entry)
    _share_memory(kernel, shared, card.index)
    return kernel


def _share_memory(kernel: Any, shared: int, index: int) -> None:
    """Let a kernel have ``shared`` bytes beside those that it declares, and say how memory is to be parted.

    A multiprocessor parts its memory anew only when it is empty. Where a kernel has left the rest to the L1,
    blocks of the next one, which could wait beside its own, come when it has ended, and several to one
    multiprocessor. Kernels that read by way of the L1 have little shared memory, and keep it.
    """
    from cuda.bindings import driver

    success, names = driver.CUresult.CUDA_SUCCESS, driver.CUfunction_attribute
    where = driver.CUkernel(int(kernel.handle)), driver.CUdevice(index)
    status, declared = driver.cuKernelGetAttribute(names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, *where)
    if status == success and shared:  # declared bytes count too: less than 48 KiB may pass the default
        most = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(most, shared, *where)
    if status == success and shared + declared >= MUCH_SHARED:
        carveout = names.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        (status,) = driver.cuKernelSetAttribute(carveout, 100, *where)
    if status != success:
        raise UsageError(
            "the card does not have the shared memory that the kernel needs",
            where=f"cuda:{index}",
            found=f"{shared} bytes asked for: {status.name}",
        )


def _make_workspace(card: Device) -> Workspace:
    import torch

    sums, marked, flags = tiles.workspace_bytes(card.multiprocessors)
    where = torch.device("cuda", card.index)
    memory = (
        torch.empty(sums // 4, dtype=torch.float32, device=where),
        torch.full((marked // 4,), -1, dtype=torch.int32, device=where),
        torch.zeros(flags, dtype=torch.int32, device=where),
    )
    torch.cuda.synchronize(where)  # marks and flags are there before any stream can use them
    return Workspace(memory[0].data_ptr(), memory[1].data_ptr(), memory[2].data_ptr(), memory)


def _late_workspace(card: Device) -> Workspace:
    """Make a workspace while work is under way, with memory of the driver's that is kept for good.

    torch may be giving out memory of a graph's pool now, which nothing outside the graph may keep, and a
    capture may be going on, which allocating would break unless the thread says that it knows what it does.
    """
    from cuda.bindings import driver

    card.enter()
    sums, marked, flags = tiles.workspace_bytes(card.multiprocessors)
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _driver(driver.cuThreadExchangeStreamCaptureMode(relaxed), card.index)
    with ExitStack() as always, ExitStack() as failed:
        always.callback(driver.cuThreadExchangeStreamCaptureMode, before)

        def room(size: int) -> int:
            address = int(_driver(driver.cuMemAlloc(size), card.index))
            failed.callback(driver.cuMemFree, address)
            return address

        made = Workspace(room(sums), room(marked), room(4 * flags))
        aside = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = _driver(driver.cuStreamCreate(int(aside)), card.index)
        always.callback(driver.cuStreamDestroy, stream)
        _driver(driver.cuMemsetD32Async(made.marked, 0xFFFFFFFF, marked // 4, stream), card.index)
        _driver(driver.cuMemsetD32Async(made.flags, 0, flags, stream), card.index)
        _driver(driver.cuStreamSynchronize(stream), card.index)
        failed.pop_all()  # kept
        return made


def _driver(answer: tuple[Any, ...], index: int) -> Any:
    """Return what a call of the driver gave.

    Raises:
        UsageError: it failed; names the driver's status.
    """
    status, *values = answer
    if int(status) != 0:
        raise UsageError(
            "the card has no room for a workspace",
            where=f"cuda:{index}",
            found=str(status),
            hint="free memory of the card and call again, or use fewer streams: each keeps a workspace",
        )
    return values[0] if values else None


@cache
def _config(grid: int | tuple[int, int], threads: int, shared: int, programmatic: bool) -> Any:
    return _core().LaunchConfig(
        grid=grid, block=threads, shmem_size=shared, programmatic_stream_serialization=programmatic
    )


def start(
    card: Device,
    entry: str,
    grid: int | tuple[int, int],
    threads: int,
    shared: int,
    handle: int,
    *arguments: Any,
) -> None:
    """Launch a kernel on a raw stream handle; pointers and ints as ctypes or Python ints (64 bit)."""
    if not _thread.entered:
        card.enter()
    launch = _core_launch()
    launch(
        card.stream(handle),
        _config(grid, threads, shared, card.programmatic),
        card.kernel(entry, shared),
        *arguments,
    )


@cache
def _core_launch() -> Any:
    return _core().launch
