"""The loader with a card: bytes on the device are those of the files, and no more memory than they need."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
library = pytest.importorskip("safetensors.torch")

from artifacts import write_artifact  # noqa: E402

from w4pack.convert.errors import W4PackError  # noqa: E402
from w4pack.kernels import linears, transfer  # noqa: E402
from w4pack.kernels.artifact import open_artifact  # noqa: E402
from w4pack.kernels.linears import Cut  # noqa: E402
from w4pack.kernels.placement import concat, make_plan, rest, stack, take  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIB = 1 << 20


def random_words(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A file of 170 MiB: many chunks, a tensor larger than several of them, small ones between."""
    shapes = {"a": (4096, 4096), "b": (1000, 4096), "c": (1000, 4096), "e": (3000, 4097), "f": (7,)}
    tensors = {name: random_words(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    tensors |= {f"n{i}": random_words(33 + i, seed=100 + i) for i in range(200)}
    path = tmp_path_factory.mktemp("big") / "x.safetensors"
    library.save_file(tensors, path)
    return path, tensors


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_file_arrives(big: tuple[Path, dict[str, torch.Tensor]], threads: int) -> None:
    path, tensors = big
    found = transfer.load_file(path, "cuda", threads=threads)
    assert found.keys() == tensors.keys()
    assert all(t.is_cuda and torch.equal(t.cpu(), tensors[name]) for name, t in found.items())


@pytest.mark.parametrize("chunk", [4096, 100_000, MIB])
def test_fused_stacked_and_sliced_tensors_arrive(
    big: tuple[Path, dict[str, torch.Tensor]], chunk: int
) -> None:
    path, tensors = big
    infos, files = transfer.file_tensors(path)
    pair = {0: (10, 210)}
    cut = {1: (1000, 1050)}  # rows of 200 bytes, 16 KB apart
    targets = {
        "fused": concat([take(infos["b"]), take(infos["c"])], 1),
        "stacked": stack([take(infos["b"], pair), take(infos["c"], pair)]),
        "columns": take(infos["a"], cut),
        "odd": take(infos["e"], {1: (3, 4000)}),
    }
    b, c = tensors["b"], tensors["c"]
    wanted = {
        "fused": torch.cat([b, c], 1),
        "stacked": torch.stack([b[10:210], c[10:210]]),
        "columns": tensors["a"][:, 1000:1050],
        "odd": tensors["e"][:, 3:4000],
    }
    for gap in (0, 1 << 30):
        plan = make_plan(targets, chunk=chunk, gap=gap)
        found = transfer.execute(plan, files, "cuda", chunk=chunk)
        assert all(torch.equal(found[key].cpu(), wanted[key]) for key in targets), gap


@pytest.mark.parametrize("size", [2, 8])
def test_ranks_together_are_the_layer(tmp_path: Path, size: int) -> None:
    specs = {
        "col": LinearSpec(256, 1024, sym=False, bias=True),
        "row": LinearSpec(1024, 256, sym=False, bias=True),
    }
    write_artifact(tmp_path, specs)
    artifact = open_artifact(tmp_path)
    whole = library.load_file(tmp_path / "model.safetensors", device="cuda")
    for module, axis, dim in (("col", "out", -1), ("row", "in", 0)):
        parts = [
            transfer.load_tensors(artifact, linears.alone(artifact, module, Cut(axis, rank, size)), "cuda")
            for rank in range(size)
        ]
        for suffix in ("weight", "weight_scale", "weight_zero_point"):
            together = torch.cat([part[suffix] for part in parts], dim)
            assert torch.equal(together.view(torch.int16), whole[f"{module}.{suffix}"].view(torch.int16))


def test_memory_on_the_device_is_that_of_the_tensors(big: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """F57: at most the bytes of the file and 64 MiB, fused tensors included."""
    path, tensors = big
    infos, files = transfer.file_tensors(path)
    fused = {"fused": concat([take(infos["b"]), take(infos["c"])], 1)}
    plan = make_plan(fused | rest(infos, fused.values()))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = transfer.execute(plan, files, "cuda")
    peak = torch.cuda.max_memory_allocated() - before
    nbytes = sum(t.numel() * 4 for t in tensors.values())
    assert nbytes <= peak <= nbytes + 4 * MIB  # alignment, and what the allocator rounds up
    assert len(found) == len(tensors) - 1


def test_staging_is_kept_and_bounded(big: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Page-locked memory: at most 256 MiB, and the second load takes no more than the first."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        pytest.skip("needs a torch that counts page-locked memory")
    path, _ = big
    transfer.load_file(path, "cuda", threads=8)
    first = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    transfer.load_file(path, "cuda", threads=8)
    assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] <= first + MIB
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= 256 * MIB


def test_memory_that_kernels_still_use_is_not_overwritten(
    big: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    """The allocator hands out a block that was freed with work on it under way: copies wait for that work."""
    path, _ = big
    size = 200 * MIB
    stream = torch.cuda.current_stream()
    transfer.load_file(path, "cuda")  # the allocator has a block of the right size, staging is there
    torch.cuda.synchronize()
    for _ in range(3):
        torch.cuda.empty_cache()
        block = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)  # about 0.2 s
        seen = block.sum(dtype=torch.int64)
        del block
        loaded = transfer.load_file(path, "cuda")
        stream.synchronize()
        assert seen.item() == 0
        del loaded


def test_a_current_stream_other_than_the_first(big: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """What was loaded can be used at once, on whatever stream is current."""
    path, tensors = big
    with torch.cuda.stream(torch.cuda.Stream()):
        found = transfer.load_file(path, "cuda")
        total = found["a"].sum(dtype=torch.int64).item()  # on that stream: no other waits for it
    assert total == tensors["a"].sum(dtype=torch.int64).item()


def test_a_second_card(big: tuple[Path, dict[str, torch.Tensor]]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    path, tensors = big
    infos, files = transfer.file_tensors(path)
    targets = {"f": concat([take(infos["b"]), take(infos["c"])], 1), "a": take(infos["a"])}
    for device in ("cuda:1", "cuda:0"):
        found = transfer.execute(make_plan(targets), files, device)
        assert found["f"].device == torch.device(device)
        assert torch.equal(found["f"].cpu(), torch.cat([tensors["b"], tensors["c"]], 1))
        assert torch.equal(found["a"].cpu(), tensors["a"])
    assert torch.cuda.current_device() == 0


def test_a_file_that_ends_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names file and byte; the device is as before and works on."""
    path = tmp_path / "x.safetensors"
    library.save_file({"a": random_words(8192, 4096)}, path)
    infos, files = transfer.file_tensors(path)
    plan = make_plan(rest(infos, ()))
    before = torch.cuda.memory_allocated()
    real = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        return 0 if offset > 100 * MIB else real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(W4PackError) as caught:
        transfer.execute(plan, files, "cuda")
    assert caught.value.code == "file-too-short"
    assert str(path) in str(caught.value.where)
    del caught
    monkeypatch.setattr(os, "preadv", real)
    assert torch.cuda.memory_allocated() == before
    assert transfer.load_file(path, "cuda")["a"].shape == (8192, 4096)


def test_too_little_memory_says_how_much_is_needed(
    big: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = big
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    used = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((used + 50 * MIB) / total)
    try:
        with pytest.raises(W4PackError) as caught:
            transfer.load_file(path, "cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert caught.value.code == "device-memory"
