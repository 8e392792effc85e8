"""Files that break, lie or escape, as the files floor meets them: rows F16, F32, F39, F40, broken set."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import checkpoints
from w4pack.convert.errors import SourceError, W4PackError
from w4pack.convert.files.checkpoint import Checkpoint, open_checkpoint
from w4pack.convert.files.local import LocalStore


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(LocalStore(folder))


def refusal(folder: Path) -> SourceError:
    with pytest.raises(SourceError) as caught:
        opened(folder)
    assert caught.value.exit_code == 1
    return caught.value


def save(path: Path, **tensors: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, path)
    return path


ONE = np.arange(6, dtype=np.int32).reshape(2, 3)

# ---- the broken set --------------------------------------------------------------------------------

QWEIGHT = "model.layers.0.mlp.down_proj.qweight"
BROKEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "bin-pickle-code": ("pickle-code", ("pytorch_model.bin", "print")),
    "header-hole": ("header-hole", ("model.safetensors", "60,520", "60,776")),
    "header-huge-shape": ("header-span", (QWEIGHT, "1099511627776, 1048576", "2,048 bytes")),
    "header-length-lies": ("header-too-large", ("model.safetensors", "1,152,921,504,606,846,976", "60,520")),
    "header-negative-offset": ("header-offsets", (QWEIGHT, "[-8, 8]")),
    "header-not-json": ("header-json", ("model.safetensors",)),
    "header-offset-past-end": ("header-span", (QWEIGHT,)),
    "header-overlap": ("header-overlap", (QWEIGHT,)),
    "header-shape-lies": ("header-span", (QWEIGHT, "8,192 bytes", "2,048 bytes")),
    "header-unknown-dtype": ("header-dtype", (QWEIGHT, "I3")),
    "index-path-escape": ("path-escape", ("../sharded/model-00001-of-00003.safetensors",)),
    "index-tensor-missing": (
        "missing-tensor",
        ("model.layers.0.mlp.down_proj.scales_x", "model-00001-of-00003.safetensors"),
    ),
    "shard-missing": ("missing-shard", ("model-00002-of-00003.safetensors", "11 tensors")),
    "shard-truncated": ("file-too-short", ("model-00003-of-00003.safetensors", "5,448", "4,448")),
}
SLOW_IMPORT = {"bin", "bin-pickle-code"}  # these need torch


def broken(name: str, tmp_path: Path) -> Path:
    if name in SLOW_IMPORT:
        pytest.importorskip("torch", reason="needs torch")
    return checkpoints.lay_out(f"broken/{name}", tmp_path / "src")


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_with_code_and_numbers(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if name not in checkpoints.broken_names():
        pytest.skip("needs the fixtures folder (W4PACK_SHARED or ../shared)")
    assert checkpoints.meta(f"broken/{name}")["exit"] == 1
    error = refusal(broken(name, tmp_path))
    code, words = BROKEN[name]
    assert error.code == code
    for word in words:
        assert word in str(error)
    assert "unpickled code ran" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", sorted(set(checkpoints.broken_names()) - set(BROKEN)))
def test_what_is_broken_in_meaning_only_opens(name: str, tmp_path: Path) -> None:
    with opened(broken(name, tmp_path)) as got:
        assert len(got.tensors) >= 24
        assert got.notices == []


@pytest.mark.parametrize("name", ["bin", "sharded"])
def test_the_same_tensors_in_other_files(name: str, tmp_path: Path) -> None:
    if name not in checkpoints.broken_names():
        pytest.skip("needs the fixtures folder (W4PACK_SHARED or ../shared)")
    plain = checkpoints.lay_out("gptqmodel-w4g32-sym-mini-llama", tmp_path / "plain")
    with opened(broken(name, tmp_path)) as got, opened(plain) as want:
        assert list(got.tensors) == list(want.tensors)
        for key, info in want.tensors.items():
            assert (got.tensors[key].dtype, got.tensors[key].shape) == (info.dtype, info.shape)
            assert got.read(key).tobytes() == want.read(key).tobytes()


# ---- F32, F40: memory ------------------------------------------------------------------------------

MEASURED = """
import resource, sys
import numpy
from w4pack.convert.errors import SourceError
from w4pack.convert.files.checkpoint import open_checkpoint
from w4pack.convert.files.local import LocalStore
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
base = peak()
try:
    open_checkpoint(LocalStore(sys.argv[1])).close()
    print("opened")
except SourceError as error:
    print(error.code)
print((peak() - base) // 1024)
"""


def measured(folder: Path) -> tuple[str, int]:
    """Open a folder in a process of its own; return what came of it, and the MiB it took at its peak."""
    words = [sys.executable, "-c", MEASURED, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    outcome, mib = done.stdout.split()
    return outcome, int(mib)


def sparse(path: Path, header_length: int, size: int, head: bytes = b"") -> None:
    """Write a file that claims a header, is ``size`` bytes long, and takes no disk."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", header_length) + head)
        file.truncate(size)


def test_f40_a_header_that_claims_2_to_60_bytes_takes_no_memory(tmp_path: Path) -> None:
    sparse(tmp_path / "model.safetensors", 2**60, 10**9)
    assert measured(tmp_path) == ("header-too-large", 0)


def test_f40_a_header_of_90_mib_of_nothing_is_refused_within_the_limit(tmp_path: Path) -> None:
    sparse(tmp_path / "model.safetensors", 90 << 20, (90 << 20) + 8)
    outcome, mib = measured(tmp_path)
    assert outcome == "header-json"
    assert mib < 256


def test_f40_a_header_of_90_mib_of_padding_is_read_within_the_limit(tmp_path: Path) -> None:
    raw = b"{" + b" " * ((90 << 20) - 2) + b"}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    outcome, mib = measured(tmp_path)
    assert outcome == "opened"
    assert mib < 256


def test_f40_a_million_empty_tensors_are_refused_within_the_limit(tmp_path: Path) -> None:
    entries = ",".join(f'"t{i}":{{"dtype":"F16","shape":[0],"data_offsets":[0,0]}}' for i in range(10**6))
    raw = b"{" + entries.encode() + b"}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    outcome, mib = measured(tmp_path)
    assert outcome == "header-too-many"
    assert mib < 256


HOSTILE: dict[str, bytes] = {
    "one long name": b'{"' + b"x" * (90 << 20) + b'":1}',
    "one long name of another script": b'{"' + "ß".encode() * (45 << 20) + b'":1}',
    "one metadata value": b'{"__metadata__":{"a":"' + b"x" * (90 << 20) + b'"}}',
    "lists in lists": b'{"a":' + b"[" * 990_000 + b"]" * 990_000 + b"}",
    "many numbers": b'{"a":[' + b"0," * 1_990_000 + b"0]}",
    "many big numbers": b'{"a":[' + b"123456789012," * 1_990_000 + b"0]}",
    "many keys": b'{"__metadata__":{' + b",".join(b'"%d":"%d"' % (i, i) for i in range(990_000)) + b"}}",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_f40_headers_made_to_fill_memory(case: str, tmp_path: Path) -> None:
    raw = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    _, mib = measured(tmp_path)
    assert mib < 320, f"{mib} MiB for a header of {len(raw) >> 20} MiB"


# ---- F39: what cannot be read ----------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user that file modes bind")
def test_f39_a_file_without_read_permission_is_named(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", w=ONE).chmod(0)
    error = refusal(tmp_path)
    assert error.code == "unreadable"
    assert (error.where, error.found) == (str(tmp_path / "model.safetensors"), "Permission denied")


def test_f39_an_error_of_the_disk_is_one_line_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model.safetensors", w=ONE)

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    error = refusal(tmp_path)
    assert error.code == "unreadable"
    assert (error.where, error.found) == (str(tmp_path / "model.safetensors"), "Input/output error")


def test_f39_no_permission_to_open_is_translated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "model.safetensors", w=ONE)
    real = os.open

    def guarded(name: Any, *rest: Any, **more: Any) -> int:
        if os.fspath(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", guarded)
    assert refusal(tmp_path).found == "Permission denied"


@pytest.mark.parametrize(
    ("name", "code"), [("nowhere", "no-such-folder"), ("file", "not-a-folder"), ("a\0b", "unreadable")]
)
def test_sources_that_are_no_folders(name: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError) as caught:
        LocalStore(f"{tmp_path}/{name}")
    assert caught.value.code == code
    assert caught.value.where == f"{tmp_path}/{name}"


def test_pipes_and_links_to_folders_are_never_opened(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", w=ONE)
    (tmp_path / "sub").mkdir()
    (tmp_path / "again").symlink_to("sub")
    os.mkfifo(tmp_path / "pipe.json")
    with opened(tmp_path) as got:
        assert not got.side_files
        assert sorted(got.left_out) == [
            ("again", 0, "a link to a folder"),
            ("pipe.json", 0, "not a regular file"),
        ]


# ---- F40: links ------------------------------------------------------------------------------------


def outside(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "src"
    source.mkdir()
    return source, save(tmp_path / "outside" / "model.safetensors", w=ONE)


@pytest.mark.parametrize("absolute", [True, False])
def test_f40_a_shard_that_is_a_link_to_the_outside_is_refused(absolute: bool, tmp_path: Path) -> None:
    source, target = outside(tmp_path)
    (source / "model.safetensors").symlink_to(target if absolute else "../outside/model.safetensors")
    error = refusal(source)
    assert error.code == "path-escape"
    assert "model.safetensors" in error.what
    assert "outside" in str(error.found)


def test_f40_a_side_file_that_is_a_link_to_the_outside_is_refused(tmp_path: Path) -> None:
    source, _ = outside(tmp_path)
    save(source / "model.safetensors", w=ONE)
    (tmp_path / "secret").write_bytes(b"secret")
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").symlink_to("../../secret")
    error = refusal(source)
    assert (error.code, error.where) == ("path-escape", str(source / "sub" / "notes.txt"))


def test_f40_a_folder_whose_name_begins_like_ours_is_outside(tmp_path: Path) -> None:
    source, _ = outside(tmp_path)
    save(tmp_path / "src-other" / "model.safetensors", w=ONE)
    (source / "model.safetensors").symlink_to("../src-other/model.safetensors")
    assert refusal(source).code == "path-escape"


@pytest.mark.parametrize("target", ["nothing", "model.safetensors"])
def test_f40_links_that_lead_nowhere_or_to_themselves_are_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(target)
    error = refusal(tmp_path)
    assert error.code == "broken-link"
    assert error.where == str(tmp_path / "model.safetensors")


def test_a_link_within_the_folder_is_fine(tmp_path: Path) -> None:
    save(tmp_path / "real" / "data", w=ONE)
    (tmp_path / "model.safetensors").symlink_to("real/data")
    with opened(tmp_path) as got:
        assert (got.read("w") == ONE).all()


def test_a_folder_reached_through_a_link_is_fine(tmp_path: Path) -> None:
    save(tmp_path / "real" / "model.safetensors", w=ONE)
    (tmp_path / "link").symlink_to("real")
    with opened(tmp_path / "link") as got:
        assert got.label == str(tmp_path / "link")
        assert (got.read("w") == ONE).all()


def hub_cache(tmp_path: Path, repo: str = "models--org--name", between: str = "snapshots") -> Path:
    """Write a repository as the Hub client keeps it: files are links into ``blobs``."""
    snapshot = tmp_path / repo / between / ("0" * 40)
    blobs = tmp_path / repo / "blobs"
    (snapshot / "sub").mkdir(parents=True)
    save(blobs / "abc", w=ONE)
    (blobs / "def").write_bytes(b"text")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "sub" / "x.txt").symlink_to("../../../blobs/def")
    return snapshot


def test_f40_links_of_the_hub_cache_are_fine(tmp_path: Path) -> None:
    with opened(hub_cache(tmp_path)) as got:
        assert (got.read("w") == ONE).all()
        assert got.side_files == {"sub/x.txt": 4}
        assert got.store.read("sub/x.txt", 10) == b"text"


@pytest.mark.parametrize(
    ("repo", "between"), [("something", "snapshots"), ("models--org--name", "revisions")]
)
def test_f40_a_folder_that_only_looks_like_a_cache_is_none(repo: str, between: str, tmp_path: Path) -> None:
    assert refusal(hub_cache(tmp_path, repo, between)).code == "path-escape"


def test_f40_a_cache_link_to_another_repository_is_refused(tmp_path: Path) -> None:
    hub_cache(tmp_path, "models--org--other")
    snapshot = hub_cache(tmp_path)
    (snapshot / "x").symlink_to("../../../models--org--other/blobs/def")
    assert refusal(snapshot).code == "path-escape"


# ---- F16: pickles ----------------------------------------------------------------------------------


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="needs torch")


def pickled(folder: Path, torch: Any, value: Any, name: str = "pytorch_model.bin", **config: Any) -> Path:
    torch.save(value, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_f16_aliases_and_views_become_tensors_of_their_own(torch: Any, tmp_path: Path) -> None:
    a = torch.arange(24, dtype=torch.float16).reshape(4, 6)
    state = OrderedDict(a=a, b=a, c=a[:, ::2], d=a.t(), e=a[1:3], f=a[0, 0])
    pickled(tmp_path, torch, state)
    with opened(tmp_path) as got:
        assert {n: (i.dtype, i.shape, i.nbytes) for n, i in got.tensors.items()} == {
            "a": ("F16", (4, 6), 48),
            "b": ("F16", (4, 6), 48),
            "c": ("F16", (4, 3), 24),
            "d": ("F16", (6, 4), 48),
            "e": ("F16", (2, 6), 24),
            "f": ("F16", (), 2),
        }
        want = np.arange(24, dtype=np.float16).reshape(4, 6)
        for name, value in {"a": want, "b": want, "c": want[:, ::2], "d": want.T, "e": want[1:3]}.items():
            assert (got.read(name) == value).all()
            assert (got.rect(name, slice(1, None), slice(0, 2)) == value[1:, :2]).all()
        assert got.read("f") == want[0, 0]
        assert got.notices == []


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("place", [{}, {"text_config": {}}])
def test_f16_the_alias_of_a_tie_in_the_config_is_read_once(
    place: dict[str, Any], torch: Any, tmp_path: Path
) -> None:
    weight = torch.ones(4, 4)
    config = {"text_config": {"tie_word_embeddings": True}} if place else {"tie_word_embeddings": True}
    pickled(tmp_path, torch, {EMBEDDING: weight, HEAD: weight, "x": weight}, **config)
    with opened(tmp_path) as got:
        assert list(got.tensors) == [EMBEDDING, "x"]
        assert [(n.code, n.where) for n in got.notices] == [("tied-alias", "pytorch_model.bin")]
        assert HEAD in got.notices[0].found


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": "true"}])
def test_f16_without_a_tie_in_the_config_both_are_read(
    config: dict[str, Any], torch: Any, tmp_path: Path
) -> None:
    weight = torch.ones(4, 4)
    pickled(tmp_path, torch, {EMBEDDING: weight, HEAD: weight}, **config)
    with opened(tmp_path) as got:
        assert sorted(got.tensors) == [HEAD, EMBEDDING]


def test_f16_a_tied_head_with_memory_of_its_own_is_read(torch: Any, tmp_path: Path) -> None:
    state = {EMBEDDING: torch.ones(4, 4), HEAD: torch.ones(4, 4)}
    pickled(tmp_path, torch, state, tie_word_embeddings=True)
    with opened(tmp_path) as got:
        assert len(got.tensors) == 2


def test_pickles_of_every_dtype_keep_their_bits(torch: Any, tmp_path: Path) -> None:
    names = "bool uint8 int8 int16 float16 bfloat16 int32 float32 int64 float64 complex64 float8_e4m3fn"
    raw = torch.arange(64, dtype=torch.uint8).reshape(8, 8) % 2
    state = {name: raw.view(getattr(torch, name)).clone() for name in names.split()}
    pickled(tmp_path, torch, state)
    with opened(tmp_path) as got:
        for name, tensor in state.items():
            assert got.read(name).tobytes() == bytes(raw.numpy()), name
            assert got.tensors[name].shape == tuple(tensor.shape)


def test_sharded_pickles_follow_their_index(torch: Any, tmp_path: Path) -> None:
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    pickled(tmp_path, torch, {"a": torch.ones(3)}, names[0])
    pickled(tmp_path, torch, {"b": torch.zeros(2, 2)}, names[1])
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(
        json.dumps({"metadata": {"total_size": 28}, "weight_map": {"a": names[0], "b": names[1]}})
    )
    (tmp_path / "optimizer.bin").write_bytes(b"state")
    with opened(tmp_path) as got:
        assert got.weight_files == tuple(names)
        assert got.index == index.name
        assert got.read("b").shape == (2, 2)
        assert got.notices == []
        assert [entry[0] for entry in got.left_out] == ["optimizer.bin"]
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[0]}}))
    assert refusal(tmp_path).where == f"{names[0]}, b"


def test_one_pickle_of_any_name_beside_what_trainers_leave(torch: Any, tmp_path: Path) -> None:
    pickled(tmp_path, torch, {"a": torch.ones(3)}, "llama-7b-4bit-128g.pt")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"):
        (tmp_path / name).write_bytes(b"state")
    with opened(tmp_path) as got:
        assert got.weight_files == ("llama-7b-4bit-128g.pt",)


def test_the_old_format_is_read_and_said(torch: Any, tmp_path: Path) -> None:
    torch.save(
        {"a": torch.arange(6).reshape(2, 3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False
    )
    with opened(tmp_path) as got:
        assert got.read("a").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert [n.code for n in got.notices] == ["pickle-in-memory"]


class Trap:
    """Prints when it is loaded by an ordinary unpickler."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("unpickled code ran",))


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("where", ["alone", "as a value", "as a key", "in a list"])
def test_f16_code_in_a_pickle_never_runs(
    where: str, new: bool, torch: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a = torch.ones(2)
    value = {
        "alone": Trap(),
        "as a value": {"a": a, "b": Trap()},
        "as a key": {"a": a, ("x", Trap()): a},
        "in a list": [a, Trap()],
    }[where]
    torch.save(value, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=new)
    error = refusal(tmp_path)
    assert error.code == "pickle-code"
    assert error.where == "pytorch_model.bin"
    assert "print" in str(error.found)
    assert "unpickled code ran" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([1, 2], "list"),
        ({"a": 1}, "int"),
        ({"a": {"b": None}}, "dict"),
        ({1: None}, "int"),
        (None, "NoneType"),
    ],
)
def test_pickles_of_plain_objects_are_refused(value: Any, found: str, torch: Any, tmp_path: Path) -> None:
    pickled(tmp_path, torch, value)
    error = refusal(tmp_path)
    assert error.code == "pickle-object"
    assert found in str(error.found)


def test_tensors_without_a_safetensors_twin_are_refused(torch: Any, tmp_path: Path) -> None:
    pickled(tmp_path, torch, {"a": torch.ones(2), "s": torch.ones(2, 2).to_sparse()})
    error = refusal(tmp_path)
    assert (error.code, error.where) == ("pickle-tensor", "pytorch_model.bin, s")


def damaged(torch: Any, tmp_path: Path) -> dict[str, bytes]:
    torch.save({"a": torch.ones(100)}, tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    (tmp_path / "good").unlink()
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("x", "y")
    other = (tmp_path / "zip").read_bytes()
    (tmp_path / "zip").unlink()
    return {
        "empty": b"",
        "text": b"hello",
        "zeros": bytes(100),
        "start of a zip": b"PK\x03\x04" + bytes(60),
        "cut": good[: len(good) // 2],
        "another zip": other,
        "a plain pickle": pickle.dumps({"a": 1}),
        "a pickle cut short": pickle.dumps({"a": [1, 2, 3]})[:-4],
    }


@pytest.mark.parametrize(
    "case",
    [
        "empty",
        "text",
        "zeros",
        "start of a zip",
        "cut",
        "another zip",
        "a plain pickle",
        "a pickle cut short",
    ],
)
def test_damaged_pickles_are_named(case: str, torch: Any, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(damaged(torch, tmp_path)[case])
    error = refusal(tmp_path)
    assert error.code in ("bad-pickle", "pickle-code", "pickle-object")
    assert "pytorch_model.bin" in error.what
    assert "\n" not in str(error.found)


def test_without_torch_the_way_to_get_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(W4PackError) as caught:
        opened(tmp_path)
    assert (caught.value.code, caught.value.exit_code) == ("extra-missing", 2)
    assert "w4pack[quantize]" in str(caught.value.hint)
