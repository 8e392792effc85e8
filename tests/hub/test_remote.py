"""A repository read in place: the right bytes, few requests, counted and limited."""

import json
import random
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from w4pack.convert.errors import HubError, SourceError
from w4pack.convert.hub import remote
from w4pack.convert.hub.remote import HEAD_LARGE, HubStore
from w4pack.convert.hub.resolve import HubSource

SOURCE = HubSource("ORG/NAME", None)
SHARDS = [f"model-{i:05d}-of-00012.safetensors" for i in range(1, 13)]


@pytest.fixture(autouse=True)
def _as_for_large_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files here are small and stand for large ones; small models are read whole, with one request."""
    monkeypatch.setattr(remote, "SMALL_MODEL", 0)


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def read(store: HubStore, name: str, offset: int, length: int) -> bytes:
    data = bytearray(length)
    store.blob(name).read_into(offset, memoryview(data))
    return bytes(data)


def sharded(size: int = 600_000) -> dict[str, bytes]:
    return {name: content(size, i) for i, name in enumerate(SHARDS)}


def test_files_are_listed_with_sizes_in_one_request(hub: Any) -> None:
    files = {"config.json": b"{}", "model.safetensors": content(5000), "code/x.py": b"1"}
    repo = hub.add("ORG/NAME", files)
    with HubStore(SOURCE) as store:
        assert dict(store.files()) == {".gitattributes": 25, **{k: len(v) for k, v in files.items()}}
        assert store.commit == repo.head
        assert (store.requests, store.bytes_read) == (1, 0)
    assert len(hub.calls) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_reads_give_the_bytes_of_the_file(hub: Any, ranges: bool) -> None:
    data = content(700_000)
    hub.ranges = ranges
    hub.add("ORG/NAME", {"model.safetensors": data, "config.json": b'{"a": 1}'})
    with HubStore(SOURCE) as store:
        assert store.read("config.json", 100) == b'{"a": 1}'
        for offset, length in [(0, 8), (8, 3000), (262_143, 2), (699_999, 1), (0, 700_000), (350_000, 0)]:
            assert read(store, "model.safetensors", offset, length) == data[offset : offset + length]
    assert hub.leaks == 0


def test_one_request_a_shard_for_all_headers(hub: Any) -> None:
    files = sharded()
    hub.add("ORG/NAME", files)
    with HubStore(SOURCE) as store:
        for name in SHARDS:
            head = read(store, name, 0, 8)
            assert head == files[name][:8]
            assert read(store, name, 8, 200_000) == files[name][8:200_008]
        assert store.bytes_read == 12 * HEAD_LARGE
    ranges = [c.range for c in hub.calls if c.path.startswith("cdn:")]
    assert ranges == [f"bytes=0-{HEAD_LARGE - 1}"] * 12
    assert len(hub.calls) == 1 + 2 * 12  # the list; for each shard the Hub's redirect and the object itself


def test_a_small_model_is_read_with_one_request_a_shard(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SMALL_MODEL", 1 << 20)
    data = content(1 << 20)
    hub.add("ORG/NAME", {"model.safetensors": data})
    with HubStore(SOURCE) as store:
        for offset in (0, 500_000, (1 << 20) - 10):
            assert read(store, "model.safetensors", offset, 10) == data[offset : offset + 10]
        assert store.bytes_read == 1 << 20
    assert hub.count("GET", "^cdn:") == 1


def test_a_header_longer_than_the_first_read_costs_one_more_request(hub: Any) -> None:
    data = struct.pack("<Q", 500_000) + content(599_992)
    hub.add("ORG/NAME", {"model.safetensors": data})
    with HubStore(SOURCE) as store:
        assert read(store, "model.safetensors", 0, 8) == data[:8]
        assert read(store, "model.safetensors", 8, 500_000) == data[8:500_008]
    assert hub.count("GET", "^cdn:") == 2
    assert hub.count("GET", "/resolve/") == 1  # the address behind the redirect is kept


LAYERS = 40


def gptq_shards(shards: int = 4) -> dict[str, bytes]:
    """Shards of layers with codes, zeros and g_idx as GPTQ stores them, spread out by their codes."""
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    files = {}
    for number, file in enumerate(names):
        header: dict[str, Any] = {}
        at = 0
        for layer in range(number * LAYERS // shards, (number + 1) * LAYERS // shards):
            for suffix, dtype, shape in (
                ("g_idx", "I32", [256]),
                ("qweight", "I32", [32, 600]),
                ("qzeros", "I32", [2, 75]),
            ):
                size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
                entry = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
                header[f"model.layers.{layer}.q_proj.{suffix}"] = entry
                at += size
        raw = json.dumps(header).encode()
        files[file] = struct.pack("<Q", len(raw)) + raw + content(at, number)
    return files


def places(files: dict[str, bytes], suffix: str) -> list[tuple[str, int, list[int]]]:
    """(file, offset, shape) of each layer's tensor, in the order of the layers."""
    found = []
    for file, data in files.items():
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name.endswith(suffix):
                layer = int(name.split(".")[2])
                found.append((layer, (file, 8 + length + entry["data_offsets"][0], entry["shape"])))
    return [place for _, place in sorted(found)]


@pytest.mark.parametrize("head", [1000, 64 << 10])
def test_the_first_of_many_small_tensors_brings_the_others(
    hub: Any, monkeypatch: pytest.MonkeyPatch, head: int
) -> None:
    """Also where the header is longer than the first read of each shard."""
    monkeypatch.setattr(remote, "HEAD_SMALL", head)
    monkeypatch.setattr(remote, "HEAD_LARGE", head)
    files = gptq_shards()
    hub.add("ORG/NAME", files)
    with HubStore(SOURCE) as store:
        for file, offset, shape in places(files, "g_idx"):
            size = 4 * shape[0]
            assert read(store, file, offset, size) == files[file][offset : offset + size]
        calls = len(hub.calls)
        file, offset, shape = places(files, "g_idx")[-1]
        read(store, file, offset, 4 * shape[0])
        for file, offset, shape in places(files, "qzeros"):
            row = 4 * shape[1]
            assert read(store, file, offset, row) == files[file][offset : offset + row]
        # one row of each: the first read fetched all of them, and nothing else was asked for
        assert len(hub.calls) - calls <= 2 * 4  # for 40 layers in 4 shards
        assert store.bytes_read <= sum(map(len, files.values()))
        before = store.bytes_read
        file, offset, shape = places(files, "qweight")[-1]
        assert read(store, file, offset + 400, 100) == files[file][offset + 400 : offset + 500]
        assert store.bytes_read == before + 100  # a read inside a tensor says nothing about the next


def test_reading_ahead_leaves_half_of_the_limit(hub: Any) -> None:
    files = gptq_shards()
    hub.add("ORG/NAME", files)
    with HubStore(SOURCE, limit=1_060_000) as store:
        file, offset, shape = places(files, "g_idx")[0]
        read(store, file, 0, 8)
        before = store.bytes_read
        read(store, file, offset, 4 * shape[0])
        assert store.bytes_read - before <= (1_060_000 - before) // 2 + 4 * shape[0]


def test_near_ranges_are_fetched_together(hub: Any) -> None:
    data = content(3_000_000)
    hub.add("ORG/NAME", {"model.safetensors": data})
    with HubStore(SOURCE) as store:
        parts = [(1_000_000, 4000), (1_010_000, 4000), (2_000_000, 500), (2_999_990, 100), (5_000_000, 10)]
        store.prefetch(("model.safetensors", at, size) for at, size in parts)
        assert hub.count("GET", "^cdn:") == 3
        for at, size in parts[:3]:
            assert read(store, "model.safetensors", at, size) == data[at : at + size]
    assert hub.count("GET", "^cdn:") == 3 + 1  # the start, which `blob` asks for


def test_the_commit_is_fixed_at_the_first_request(hub: Any) -> None:
    repo = hub.add("ORG/NAME", {"config.json": b"old"})
    with HubStore(SOURCE) as store:
        repo.commit({**repo.tree, "config.json": b"new"})
        assert store.read("config.json", 10) == b"old"


def test_the_token_goes_to_the_hub_and_nowhere_else(hub: Any) -> None:
    hub.add("ORG/NAME", sharded(1000), private=True)
    with HubStore(SOURCE) as store:
        read(store, SHARDS[0], 0, 10)
    assert hub.leaks == 0
    at_hub = [c for c in hub.calls if not c.path.startswith("cdn:")]
    assert at_hub and all(c.authorized for c in at_hub)


def test_the_limit_stops_a_question_before_the_request(hub: Any) -> None:
    hub.add("ORG/NAME", {"model.safetensors": content(2_000_000)})
    with HubStore(SOURCE, limit=1_000_000) as store:
        read(store, "model.safetensors", 1_000_000, 700_000)
        calls = len(hub.calls)
        with pytest.raises(HubError) as caught:
            read(store, "model.safetensors", 0, 1_500_000)
        assert caught.value.code == "read-limit"
        assert "--thorough" in str(caught.value.hint)
        assert len(hub.calls) == calls
        assert store.bytes_read <= 1_000_000
    with HubStore(SOURCE, limit=1_000_000, thorough=True) as store:
        assert len(read(store, "model.safetensors", 0, 1_500_000)) == 1_500_000


def test_a_missing_file_and_a_large_one_are_source_errors(hub: Any) -> None:
    hub.add("ORG/NAME", {"config.json": b"x" * 50})
    with HubStore(SOURCE) as store:
        with pytest.raises(SourceError) as caught:
            store.blob("none.safetensors")
        assert caught.value.code == "missing-file"
        with pytest.raises(SourceError) as caught:
            store.read("config.json", 49)
        assert caught.value.code == "file-too-large"
        assert store.read("config.json", 50) == b"x" * 50
        with pytest.raises(SourceError) as caught:
            read(store, "config.json", 49, 2)
        assert caught.value.code == "short-read"


@pytest.mark.parametrize("status", [429, 500, 503, None])
@pytest.mark.parametrize("path", [r"/api/models/ORG/NAME", r"/ORG/NAME/resolve/", r"^/objects/"])
def test_faults_that_pass_are_repeated(hub: Any, quick: list[float], path: str, status: int | None) -> None:
    data = content(500_000)
    hub.add("ORG/NAME", {"model.safetensors": data})
    fault = hub.fault("GET", path, status, times=3, headers={"Retry-After": "2"} if status == 429 else {})
    with HubStore(SOURCE) as store:
        assert read(store, "model.safetensors", 0, 300_000) == data[:300_000]
    assert fault.times == 0
    assert len(quick) == 3
    assert quick == [2.0] * 3 if status == 429 else max(quick) < 5


def test_a_connection_dropped_in_the_middle_is_repeated(hub: Any, quick: list[float]) -> None:
    data = content(500_000)
    hub.add("ORG/NAME", {"model.safetensors": data})
    hub.fault("GET", r"^/objects/", None, after=100_000, times=2)
    with HubStore(SOURCE) as store:
        assert read(store, "model.safetensors", 0, 200_000) == data[:200_000]
    assert hub.count("GET", "^cdn:") == 3


@pytest.mark.parametrize("status", [429, 503, None])
def test_a_fault_that_stays_ends_in_bounded_time(hub: Any, quick: list[float], status: int | None) -> None:
    hub.add("ORG/NAME", {"config.json": b"{}"})
    hub.fault("GET", r"/resolve/", status, times=-1)
    with HubStore(SOURCE) as store, pytest.raises(HubError) as caught:
        store.read("config.json", 10)
    assert caught.value.code == {429: "rate-limit", 503: "server-fault", None: "unreachable"}[status]
    assert hub.count("GET", "/resolve/") == 4
    assert sum(quick) < 15


def test_a_wait_longer_than_the_patience_is_not_begun(hub: Any, quick: list[float]) -> None:
    hub.add("ORG/NAME", {"config.json": b"{}"})
    hub.fault("GET", r"/api/models/", 429, times=-1, headers={"Retry-After": "300"})
    with pytest.raises(HubError) as caught:
        HubStore(SOURCE)
    assert (caught.value.code, quick, len(hub.calls)) == ("rate-limit", [], 1)
    assert "300 seconds" in str(caught.value.hint)


@pytest.mark.parametrize("status", [401, 403])
def test_what_is_forbidden_is_asked_once(hub: Any, quick: list[float], status: int) -> None:
    hub.add("ORG/NAME", {"config.json": b"{}"})
    hub.fault("GET", r"/resolve/", status, times=-1, text="not for you")
    with HubStore(SOURCE) as store, pytest.raises(HubError) as caught:
        store.read("config.json", 10)
    assert "not for you" in str(caught.value)
    assert (quick, hub.count("GET", "/resolve/")) == ([], 1)


def test_an_expired_address_is_asked_for_again(hub: Any, quick: list[float]) -> None:
    data = content(900_000)
    hub.add("ORG/NAME", {"model.safetensors": data})
    with HubStore(SOURCE) as store:
        read(store, "model.safetensors", 0, 10)
        hub.fault("GET", r"^/objects/", 403)
        assert read(store, "model.safetensors", 800_000, 10) == data[800_000:800_010]
    assert hub.count("GET", "/resolve/") == 2
    assert quick == []


def test_a_private_or_missing_repository_says_what_to_do(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("ORG/NAME", {}, private=True)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError) as caught:
        HubStore(SOURCE)
    assert "hf auth login" in str(caught.value.hint)


def test_threads_share_a_store(hub: Any) -> None:
    files = sharded()
    hub.add("ORG/NAME", files)
    picks = [(name, at) for name in SHARDS for at in (0, 300_000, 599_000)] * 2
    with HubStore(SOURCE) as store, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda p: read(store, p[0], p[1], 1000), picks))
        assert store.bytes_read <= 12 * HEAD_LARGE + len(picks) * 1000
    assert found == [files[name][at : at + 1000] for name, at in picks]


def test_the_starts_of_many_shards_are_asked_for_side_by_side(hub: Any) -> None:
    """Each answer waits until four requests are there: it comes only if four are under way at once."""
    hub.add("ORG/NAME", sharded(1000))
    barrier = threading.Barrier(4, timeout=20)
    gate = threading.Event()
    original = hub.cdn.RequestHandlerClass.route

    def together(handler: Any) -> None:
        if not gate.is_set():
            barrier.wait()
            gate.set()
        original(handler)

    hub.cdn.RequestHandlerClass.route = together
    with HubStore(SOURCE) as store:
        read(store, SHARDS[0], 0, 10)
