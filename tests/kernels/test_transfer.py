"""The loader on the CPU: equal to the safetensors library, and nothing half done where something fails."""

import contextlib
import ctypes
import gc
import itertools
import json
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from artifacts import write_artifact
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
library = pytest.importorskip("safetensors.torch")

from w4pack.convert.errors import EXIT_VERIFY, SourceError, UsageError, VerifyError, W4PackError  # noqa: E402
from w4pack.kernels import hashes, linears, movers, transfer  # noqa: E402
from w4pack.kernels.artifact import open_artifact  # noqa: E402
from w4pack.kernels.placement import concat, make_plan, rest, stack, take  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
Tensors = dict[str, "torch.Tensor"]


def random_tensor(dtype: "torch.dtype", shape: tuple[int, ...], seed: int) -> "torch.Tensor":
    size = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    count = size
    for dim in shape:
        count *= dim
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def same(found: "torch.Tensor", wanted: "torch.Tensor") -> bool:
    if found.dtype != wanted.dtype or found.shape != wanted.shape or not found.is_contiguous():
        return False
    return bool(found.reshape(-1).view(torch.uint8).equal(wanted.reshape(-1).view(torch.uint8)))


def all_same(found: Tensors, wanted: Tensors) -> bool:
    return found.keys() == wanted.keys() and all(same(found[name], wanted[name]) for name in wanted)


@pytest.fixture(autouse=True)
def _no_thread_and_no_file_stays_open() -> Iterator[None]:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before  # noqa: PTH208


# ---- equal to the library ---------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 17), max_size=3)), min_size=1, max_size=8
    ),
    st.sampled_from([1, 13, 64, 500, 1 << 20]),
    st.integers(1, 4),
)
def test_a_file_loads_as_the_library_loads_it(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[Any], chunk: int, threads: int
) -> None:
    path = tmp_path_factory.mktemp("load") / "x.safetensors"
    tensors = {f"t{i}": random_tensor(dtype, tuple(shape), i) for i, (dtype, shape) in enumerate(kinds)}
    library.save_file(tensors, path)
    infos, files = transfer.file_tensors(path)
    plan = make_plan(rest(infos, ()), chunk=chunk)
    assert all_same(transfer.execute(plan, files, "cpu", threads=threads, chunk=chunk), tensors)
    assert all_same(transfer.load_file(path), library.load_file(path))


@given(st.data())
def test_shards_are_sliced_fused_and_stacked_as_torch_does(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Ranks' slices of experts of 16-bit or packed tensors, from two files, against torch.cat and stack."""
    folder = tmp_path_factory.mktemp("shards")
    dtype = data.draw(st.sampled_from(DTYPES))
    rows, cols, size = (data.draw(st.integers(1, 9)) for _ in range(3))
    rank = data.draw(st.integers(0, size - 1))
    axis = data.draw(st.integers(0, 1))
    shape = (rows * size, cols) if axis == 0 else (rows, cols * size)
    names = [f"{e}.{part}" for e in range(3) for part in ("gate", "up")]
    tensors = {name: random_tensor(dtype, shape, i) for i, name in enumerate(names)}
    where = {name: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        library.save_file({n: tensors[n] for n in names if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    infos, files = transfer.file_tensors(folder)
    share = (rows, cols)[axis]
    cut = {axis: (rank * share, (rank + 1) * share)}
    pairs = [concat([take(infos[f"{e}.{part}"], cut) for part in ("gate", "up")], axis) for e in range(3)]
    chunk, gap = data.draw(st.sampled_from([8, 50, 4096])), data.draw(st.sampled_from([0, 9, 4096]))
    plan = make_plan({"fused": stack(pairs)}, chunk=chunk, gap=gap)
    found = transfer.execute(plan, files, "cpu", threads=2, chunk=chunk)
    raw = {name: t.view(torch.uint8).reshape(*shape, -1) for name, t in tensors.items()}
    cuts = {name: t.narrow(axis, rank * share, share) for name, t in raw.items()}
    wanted = torch.stack([torch.cat([cuts[f"{e}.gate"], cuts[f"{e}.up"]], axis) for e in range(3)])
    assert found["fused"].dtype == dtype
    assert found["fused"].contiguous().view(torch.uint8).reshape(wanted.shape).equal(wanted)
    assert all_same(transfer.load_file(folder), tensors)


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(2.5), "none": torch.empty(0), "flat": torch.empty(3, 0, 2, dtype=torch.int32)
    }  # fmt: skip
    library.save_file(tensors, tmp_path / "x.safetensors")
    found = transfer.load_file(tmp_path / "x.safetensors")
    assert all_same(found, tensors)
    library.save_file({"none": torch.empty(0)}, tmp_path / "y.safetensors")
    assert transfer.load_file(tmp_path / "y.safetensors")["none"].shape == (0,)


def test_tensors_of_one_file_share_one_allocation(tmp_path: Path) -> None:
    tensors = {f"t{i}": random_tensor(torch.float16, (32, 32), i) for i in range(5)}
    library.save_file(tensors, tmp_path / "x.safetensors")
    found = transfer.load_file(tmp_path / "x.safetensors")
    starts = sorted(t.data_ptr() for t in found.values())
    assert [b - a for a, b in itertools.pairwise(starts)] == [32 * 32 * 2] * 4  # one behind the other
    assert {t.untyped_storage().nbytes() for t in found.values()} == {32 * 32 * 2}  # and each saved by itself
    assert all(t.data_ptr() % 16 == 0 for t in found.values())


def test_an_artifact_loads_fused(tmp_path: Path) -> None:
    specs = {"q": LinearSpec(128, 128), "k": LinearSpec(128, 64), "o": LinearSpec(128, 128)}
    write_artifact(tmp_path, specs, shard=9000)
    artifact = open_artifact(tmp_path)
    fused = linears.named("qk", linears.side_by_side(artifact, ["q", "k"]))
    targets = fused | linears.others(artifact, ["q", "k"], fused)
    whole: Tensors = {}
    for file in artifact.files.values():
        whole |= library.load_file(file[0])
    found = transfer.load_tensors(artifact, targets, "cpu", check_hashes=True)
    wanted = {f"qk.{s}": torch.cat([whole[f"q.{s}"], whole[f"k.{s}"]], 1) for s in ("weight", "weight_scale")}
    assert all_same(found, wanted | {n: t for n, t in whole.items() if n[0] not in "qk"})


@pytest.mark.parametrize("most", [1, 5, 100])
def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A read may return fewer bytes than asked for: network file systems and signals do that."""
    tensors = {f"t{i}": random_tensor(torch.int16, (9, 7), i) for i in range(3)}
    library.save_file(tensors, tmp_path / "x.safetensors")
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: real(fd, [bufs[0][:most]], at))
    assert all_same(transfer.load_file(tmp_path / "x.safetensors"), tensors)


# ---- what fails -------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with two files of 64 KiB in all."""
    names = [f"t{i}" for i in range(8)]
    for part in range(2):
        tensors = {n: random_tensor(torch.int32, (32, 64), i) for i, n in enumerate(names) if i % 2 == part}
        library.save_file(tensors, tmp_path / f"model-{part + 1:05d}-of-00002.safetensors")
    return tmp_path


def refuses(folder: Path, change: Callable[[Path], object], threads: int = 3) -> SourceError:
    """Load after the second file was changed behind the plan's back."""
    infos, files = transfer.file_tensors(folder)
    plan = make_plan(rest(infos, ()), chunk=1000)
    second = folder / "model-00002-of-00002.safetensors"
    change(second)
    with pytest.raises(SourceError) as caught:
        transfer.execute(plan, files, "cpu", threads=threads, chunk=1000)
    assert str(second) in str(caught.value.where)
    return caught.value


def test_a_file_that_is_gone(model: Path) -> None:
    assert refuses(model, Path.unlink).code == "unreadable"


@pytest.mark.parametrize("more", [-1, 1, -10_000])
def test_a_file_of_another_size(model: Path, more: int) -> None:
    err = refuses(model, lambda path: os.truncate(path, path.stat().st_size + more))
    assert err.code == "file-changed"


def during(monkeypatch: pytest.MonkeyPatch, event: Callable[[int], object], at: int) -> None:
    """Do something in the middle: at every read from byte ``at`` of the second file on."""
    real = os.preadv

    def read(fd: int, buffers: Any, offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().name.startswith("model-00002") and offset >= at:
            event(fd)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_that_is_truncated_while_it_is_read(
    model: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    second = model / "model-00002-of-00002.safetensors"
    err = refuses(model, lambda _: during(monkeypatch, lambda _: os.truncate(second, 9000), 8000), threads)
    assert err.code == "file-too-short"
    assert "byte " in str(err.where)
    assert err.found is not None


def test_an_error_of_the_disk_names_file_and_byte(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    err = refuses(model, lambda _: during(monkeypatch, fail, 8000))
    assert (err.code, err.found) == ("unreadable", "Input/output error")
    assert "byte " in str(err.where)


def test_the_first_error_stops_the_other_threads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = os.preadv

    def fail(fd: int, buffers: Any, offset: int) -> int:
        reads.append(offset)
        if len(reads) == 4:
            raise OSError(5, "Input/output error")
        time.sleep(0.01)
        return real(fd, buffers, offset)

    infos, files = transfer.file_tensors(model)
    plan = make_plan(rest(infos, ()), chunk=100)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SourceError):
        transfer.execute(plan, files, "cpu", threads=4, chunk=100)
    assert len(reads) < 50 < len(plan.chunks)


def test_memory_is_free_as_soon_as_the_error_is_gone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the collector of circles: on a card that memory may be needed at once."""
    seen: list[weakref.ref[Any]] = []
    allocate = transfer._allocate

    def watched(plan: Any, device: Any) -> list[torch.Tensor]:
        arenas = allocate(plan, device)
        seen.extend(weakref.ref(arena) for arena in arenas)
        return arenas

    monkeypatch.setattr(transfer, "_allocate", watched)
    infos, files = transfer.file_tensors(model)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    gc.disable()
    try:
        with contextlib.suppress(SourceError):
            transfer.execute(make_plan(rest(infos, ())), files, "cpu", threads=2)
        assert len(seen) == 2
        assert all(arena() is None for arena in seen)
    finally:
        gc.enable()


def test_an_interrupt_leaves_no_thread_behind(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle: threads end before the memory they write to is freed."""
    infos, files = transfer.file_tensors(model)
    plan = make_plan(rest(infos, ()), chunk=100)
    join, read = threading.Thread.join, os.preadv
    calls: list[int] = []

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        join(self, timeout)

    def slow(fd: int, buffers: Any, offset: int) -> int:
        time.sleep(0.2)
        return read(fd, buffers, offset)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    monkeypatch.setattr(os, "preadv", slow)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        transfer.execute(plan, files, "cpu", threads=3, chunk=100)
    assert threading.active_count() == before


def test_a_thread_that_cannot_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start
    calls: list[int] = []

    def start(self: threading.Thread) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    infos, files = transfer.file_tensors(model)
    with pytest.raises(RuntimeError, match="can't start"):
        transfer.execute(make_plan(rest(infos, ()), chunk=100), files, "cpu", threads=3, chunk=100)


def test_a_dtype_that_torch_does_not_have(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    with pytest.raises(W4PackError) as caught:
        transfer.load_file(tmp_path / "x.safetensors")
    assert (caught.value.code, caught.value.where, caught.value.found) == ("no-dtype", "x", "F6_E2M3")


def test_what_is_no_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a header at all, only some text of a few bytes")
    with pytest.raises(SourceError) as caught:
        transfer.load_file(tmp_path / "x")
    assert caught.value.code == "header-too-large"
    with pytest.raises(SourceError) as caught:
        transfer.load_file(tmp_path / "nowhere.safetensors")
    assert caught.value.code == "unreadable"
    torch.save({"x": torch.zeros(2)}, tmp_path / "model.bin")
    with pytest.raises(SourceError) as caught:
        transfer.load_file(tmp_path)
    assert caught.value.code == "not-safetensors"


@pytest.mark.parametrize(
    "device", ["cuda:99", "meta", "nonsense", "cuda" if not torch.cuda.is_available() else "mps"]
)
def test_a_device_that_is_not_there(model: Path, device: str) -> None:
    with pytest.raises(UsageError) as caught:
        transfer.load_file(model, device)
    assert (caught.value.code, caught.value.where) == ("no-device", device)


def test_nothing_to_load(model: Path) -> None:
    assert transfer.execute(make_plan({}), {}, "cpu") == {}


# ---- hashes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1000, hashes.BLOCK])
def test_a_changed_byte_is_found_by_the_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(hashes, "BLOCK", block)
    write_artifact(tmp_path, {"a": LinearSpec(128, 128), "b": LinearSpec(128, 128)}, shard=9000)
    artifact = open_artifact(tmp_path)
    targets = rest(artifact.tensors, ())
    info = artifact.tensors["b.weight"]
    with artifact.files[info.file][0].open("r+b") as file:
        file.seek(info.offset + 777)
        byte = file.read(1)
        file.seek(info.offset + 777)
        file.write(bytes([byte[0] ^ 1]))
    transfer.load_tensors(artifact, targets, "cpu")
    with pytest.raises(VerifyError) as caught:
        transfer.load_tensors(artifact, targets, "cpu", check_hashes=True)
    assert (caught.value.code, caught.value.where) == ("tensor-hash", f"{info.file}, b.weight")
    assert caught.value.exit_code == EXIT_VERIFY
    transfer.load_tensors(artifact, linears.alone(artifact, "a"), "cpu", check_hashes=True)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"tensors": []}', '{"tensors": {"a.weight": 1}}'])
def test_a_manifest_that_cannot_be_used(tmp_path: Path, content: str | None) -> None:
    write_artifact(tmp_path, {"a": LinearSpec(128, 128)})
    (tmp_path / "w4pack.json").unlink()
    if content is not None:
        (tmp_path / "w4pack.json").write_text(content)
    with pytest.raises(SourceError) as caught:
        artifact = open_artifact(tmp_path)
        transfer.load_tensors(artifact, rest(artifact.tensors, ()), "cpu", check_hashes=True)
    assert caught.value.code == ("manifest" if content else "no-manifest")


def test_a_tensor_without_a_hash(tmp_path: Path) -> None:
    write_artifact(tmp_path, {"a": LinearSpec(128, 128)})
    manifest = json.loads((tmp_path / "w4pack.json").read_text())
    del manifest["tensors"]["a.weight"]
    (tmp_path / "w4pack.json").write_text(json.dumps(manifest))
    artifact = open_artifact(tmp_path)
    with pytest.raises(VerifyError) as caught:
        transfer.load_tensors(artifact, rest(artifact.tensors, ()), "cpu", check_hashes=True)
    assert caught.value.expected == "a sha256 in w4pack.json"


# ---- threads and memory -----------------------------------------------------------------------------------


def test_threads_are_bounded_by_cores_work_and_memory(model: Path) -> None:
    infos, _ = transfer.file_tensors(model)
    plan = make_plan(rest(infos, ()), chunk=1000)
    many = len(plan.chunks)
    cores = len(os.sched_getaffinity(0))
    assert transfer._thread_count(None, len(plan.chunks), 1000) == min(cores, 8, many)
    assert transfer._thread_count(5, len(plan.chunks), 1000) == 5
    assert transfer._thread_count(1000, len(plan.chunks), 1000) == many
    assert transfer._thread_count(1000, len(plan.chunks), 8 << 20) == 16  # 2 buffers of 8 MiB each: 256 MiB
    assert transfer._thread_count(None, 0, 8 << 20) == 0


# ---- the path to a card, with the card played by main memory ----------------------------------------------


class _MemoryDriver:
    """Takes the driver's calls and does them on host addresses."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def enter(self, index: int) -> None:
        self.calls.append("enter")

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self.calls.append("copy")
        ctypes.memmove(to, source, nbytes)

    def copy_rows(
        self, to: int, step: int, source: int, pitch: int, width: int, rows: int, stream: int
    ) -> None:
        self.calls.append("copy_rows")
        for row in range(rows):
            ctypes.memmove(to + row * step, source + row * pitch, width)


class _Stream:
    cuda_stream = 7

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Event:
    def synchronize(self) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass


def test_copies_to_a_card_go_to_the_right_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _MemoryDriver()
    monkeypatch.setattr(movers, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(movers, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(
        transfer,
        "_movers",
        lambda arenas, n, chunk: [movers.CudaMover(arenas, chunk, None) for _ in range(n)],
    )
    tensors = {f"t{i}": random_tensor(torch.float16, (16, 10 + i), i) for i in range(4)}
    library.save_file(tensors, tmp_path / "x.safetensors")
    infos, files = transfer.file_tensors(tmp_path / "x.safetensors")
    fused = {"f": concat([take(infos["t0"]), take(infos["t3"])], 1)}
    plan = make_plan(fused | rest(infos, fused.values()), chunk=200)
    found = transfer.execute(plan, files, "cpu", threads=2, chunk=200)
    wanted = {"f": torch.cat([tensors["t0"], tensors["t3"]], 1), "t1": tensors["t1"], "t2": tensors["t2"]}
    assert all_same(found, wanted)
    assert set(driver.calls) == {"enter", "copy", "copy_rows"}


def test_the_driver_structure_is_that_of_the_header() -> None:
    """Offsets of CUDA_MEMCPY2D in cuda.h on 64-bit systems, counted by hand: ints are followed by padding."""
    offsets = {name: getattr(movers._Rows, name).offset for name, _ in movers._Rows._fields_}
    assert ctypes.sizeof(movers._Rows) == 128
    assert [offsets[n] for n in ("src_type", "src_host", "src_pitch", "dst_x", "dst_type")] == [
        16,
        24,
        48,
        56,
        72,
    ]
    assert [offsets[n] for n in ("dst_device", "dst_pitch", "width", "height")] == [88, 104, 112, 120]
