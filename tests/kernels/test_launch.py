"""What can be known of launches without a card: a workspace made late, through a stand-in of the driver."""

import enum
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from w4pack.convert.errors import UsageError
from w4pack.kernels import launch, tiles


class Driver(types.ModuleType):
    """Plays the driver: remembers the calls, hands out addresses, fails in the calls that it is told to."""

    class CUstreamCaptureMode:
        CU_STREAM_CAPTURE_MODE_RELAXED = 2

    class CUstream_flags:  # noqa: N801
        CU_STREAM_NON_BLOCKING = 1

    def __init__(self, fails: str = "", nth: int = 0) -> None:
        super().__init__("driver")
        self.calls: list[tuple[Any, ...]] = []
        self.held: set[int] = set()
        self.mode, self.next, self.fails, self.nth = 0, 0x1000, fails, nth

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *given: self._call(name, given)

    def _call(self, name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, *given))
        if name == self.fails and self.nth in (0, [c[0] for c in self.calls].count(name)):
            return (2, None)
        if name == "cuThreadExchangeStreamCaptureMode":
            self.mode, before = given[0], self.mode
            return (0, before)
        self.next += 0x100000
        if name in ("cuMemFree", "cuStreamDestroy"):
            self.held.remove(given[0])
        elif name in ("cuMemAlloc", "cuStreamCreate"):
            self.held.add(self.next)
            return (0, self.next)
        return (0,)


def _install(monkeypatch: pytest.MonkeyPatch, driver: types.ModuleType) -> launch.Device:
    package = types.ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return launch.Device(0, Core(getattr(driver, "calls", [])), "sm_90a", 132, 227 << 10)


class Core:
    """Plays a card of cuda-core: remembers that its context was asked for."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def set_current(self) -> None:
        self.calls.append(("context",))


def test_a_late_workspace_is_the_drivers_and_filled_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    card = _install(monkeypatch, driver)
    made = card.workspace(7)
    assert card.workspace(7) is made and made.sums != made.flags
    sums, marked, flags = tiles.workspace_bytes(132)
    assert [c[1] for c in driver.calls if c[0] == "cuMemAlloc"] == [sums, marked, 4 * flags]
    filled = [c[1:] for c in driver.calls if c[0] == "cuMemsetD32Async"]
    assert [c[:3] for c in filled] == [(made.marked, 0xFFFFFFFF, marked // 4), (made.flags, 0, flags)]
    assert all(c[3] != 7 for c in filled)
    first, *order = [c[0] for c in driver.calls]
    assert first == "context"
    last_fill = len(order) - 1 - order[::-1].index("cuMemsetD32Async")
    assert last_fill < order.index("cuStreamSynchronize") < order.index("cuStreamDestroy")
    assert order[0] == order[-1] == "cuThreadExchangeStreamCaptureMode"
    assert driver.mode == 0


def test_spares_are_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    card = _install(monkeypatch, driver)
    card.spare = [launch.Workspace(1, 2, 3)]
    assert card.workspace(5).sums == 1
    assert not driver.calls


@pytest.mark.parametrize("fails", ["cuMemAlloc", "cuStreamCreate", "cuMemsetD32Async"])
def test_a_failing_driver_is_an_error_and_the_mode_is_put_back(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    driver = Driver(fails)
    card = _install(monkeypatch, driver)
    with pytest.raises(UsageError, match="no room"):
        card.workspace(7)
    assert driver.mode == 0
    assert 7 not in card.workspaces


@pytest.mark.parametrize(
    ("fails", "nth"),
    [
        *(("cuMemAlloc", n) for n in (1, 2, 3)),
        ("cuStreamCreate", 1),
        *(("cuMemsetD32Async", n) for n in (1, 2)),
        ("cuStreamSynchronize", 1),
    ],
)
def test_a_workspace_that_failed_half_way_leaves_nothing_and_the_next_call_makes_one(
    monkeypatch: pytest.MonkeyPatch, fails: str, nth: int
) -> None:
    driver = Driver(fails, nth)
    card = _install(monkeypatch, driver)
    with pytest.raises(UsageError, match="no room"):
        card.workspace(7)
    assert (driver.held, driver.mode, card.workspaces) == (set(), 0, {})
    made = card.workspace(7)
    assert driver.held == {made.sums, made.marked, made.flags}
    assert card.workspace(7) is made


def test_a_thread_enters_the_card_before_its_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch takes a card for a new thread's current one before the driver does."""
    calls: list[tuple[Any, ...]] = []
    card = launch.Device(0, Core(calls), "sm_90a", 132, 227 << 10, {("entry", 0): "kernel"}, {7: "stream"})
    monkeypatch.setattr(launch, "_config", lambda *_: "config")
    monkeypatch.setattr(launch, "_core_launch", lambda: lambda *given: calls.append(given))
    for _ in range(2):
        calls.clear()
        thread = threading.Thread(
            target=lambda: [launch.start(card, "entry", 1, 32, 0, 7, at) for at in range(2)]
        )
        thread.start()
        thread.join()
        assert calls == [("context",), *(("stream", "config", "kernel", at) for at in range(2))]


def test_threads_that_meet_a_stream_at_once_get_one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meeting(dict[int, launch.Workspace]):
        """Lets another thread be first between the first look and the lock."""

        def get(self, handle: int, default: Any = None) -> Any:  # type: ignore[override]
            found = super().get(handle, default)
            self.setdefault(handle, theirs)
            return found

    theirs, spare = launch.Workspace(1, 2, 3), launch.Workspace(4, 5, 6)
    card = launch.Device(0, None, "sm_90a", 132, 227 << 10, spare=[spare])
    card.workspaces = Meeting()
    assert card.workspace(7) is theirs
    assert (card.workspaces[7], card.spare) == (theirs, [spare])


def test_threads_that_meet_a_card_first_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(index: int) -> launch.Device:
        time.sleep(0.05)
        made.append(index)
        return launch.Device(index, None, "sm_90a", 132, 227 << 10)

    monkeypatch.setattr(launch, "_make_device", make)
    monkeypatch.setattr(launch, "_devices", {})
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(launch.device, [0] * 8))
    assert made == [0]
    assert all(card is found[0] for card in found)


class Attributes(types.ModuleType):
    """Plays the driver's side of a kernel's attributes on a card with ``room`` bytes for a block."""

    CUkernel = CUdevice = int

    class CUresult(enum.IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_VALUE = 1

    class CUfunction_attribute(enum.Enum):  # noqa: N801
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9

    def __init__(self, declared: int, room: int = 227 << 10) -> None:
        super().__init__("driver")
        self.declared, self.room = declared, room
        self.found: dict[str, int] = {}

    def cuKernelGetAttribute(self, *_: Any) -> tuple[Any, int]:
        return self.CUresult.CUDA_SUCCESS, self.declared

    def cuKernelSetAttribute(self, attribute: Any, value: int, *_: Any) -> tuple[Any]:
        if "DYNAMIC" in attribute.name and value + self.declared > self.room:
            return (self.CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.found[attribute.name.removeprefix("CU_FUNC_ATTRIBUTE_")] = value
        return (self.CUresult.CUDA_SUCCESS,)


@pytest.mark.parametrize(
    ("declared", "shared", "found"),
    [
        (1024, 0, {}),  # the L1 is its own
        (45 << 10, 0, {"PREFERRED_SHARED_MEMORY_CARVEOUT": 100}),
        (0, 8192, {"MAX_DYNAMIC_SHARED_SIZE_BYTES": 8192}),
        (
            1024,
            200 << 10,
            {"MAX_DYNAMIC_SHARED_SIZE_BYTES": 200 << 10, "PREFERRED_SHARED_MEMORY_CARVEOUT": 100},
        ),
    ],
)
def test_kernels_that_live_in_shared_memory_part_a_multiprocessor_alike(
    monkeypatch: pytest.MonkeyPatch, declared: int, shared: int, found: dict[str, int]
) -> None:
    driver = Attributes(declared)
    _install(monkeypatch, driver)
    launch._share_memory(types.SimpleNamespace(handle=7), shared, 0)
    assert driver.found == found


def test_a_kernel_that_a_card_has_no_shared_memory_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, Attributes(1024, room=99 << 10))
    with pytest.raises(UsageError, match="does not have the shared memory") as caught:
        launch._share_memory(types.SimpleNamespace(handle=7), 100 << 10, 3)
    assert "cuda:3" in str(caught.value) and "102400 bytes" in str(caught.value)
