"""F39: the disk fills up while the work is going on: one clear error, nothing half-done, ``--resume`` works.

The fault is put in at every write in turn; where root may mount one, a real file system of few MB fills up.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import builders as b
from runner import Run, convert, run

SHARDS = ("--max-shard-size", "20KB", "--threads", "1")
TARGETS = ("marlin", "gptq")


def tree(path: Path) -> dict[str, str]:
    """Return the hash of every file below a folder."""
    files = sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one block, with an activation order in one place and side files."""
    folder = tmp_path_factory.mktemp("full") / "src"
    config = b.llama_config(
        hidden_size=128, intermediate_size=128, num_attention_heads=2, num_key_value_heads=2, vocab_size=32
    )
    model = b.model(1, config, group=64)
    down = model.linears["model.layers.0.mlp.down_proj"]
    down.gi = down.gi[np.random.default_rng(2).permutation(128)]
    b.write(folder, model, b.gptq, b.gptq_config(group=64, desc=True), shards=2)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def want(source: Path) -> dict[str, dict[str, str]]:
    """What undisturbed runs write."""
    trees = {}
    for target in TARGETS:
        convert(source, source.parent / target, target, *SHARDS).expect(0)
        trees[target] = tree(source.parent / target)
    return trees


class Fault:
    """Stands in for a function of ``os``; from the n-th call below ``folder`` on there is no room."""

    def __init__(
        self, real: Callable[..., Any], after: int, folder: Path, number: int = errno.ENOSPC
    ) -> None:
        self.real, self.after, self.folder, self.number = real, after, str(folder), number
        self.calls = 0

    def __call__(self, fd: int, *rest: Any) -> Any:
        """Fail, or do what was asked."""
        if str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(self.folder):
            self.calls += 1
            if self.calls > self.after:
                raise OSError(self.number, os.strerror(self.number))
        return self.real(fd, *rest)


def check_full(done: Run, out: Path) -> None:
    """Check what a full disk must look like: said once, with the room there is, and nothing published."""
    done.expect(1, "bytes free", "--resume")
    assert done.error["code"] == "disk-full"
    assert any(c.isdigit() for c in done.error["found"])
    assert sum(e["event"] == "error" for e in done.events) == 1
    assert done.err == ""
    assert not out.exists()
    assert out.with_name(f"{out.name}.w4pack-staging").is_dir()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("function", ["pwrite", "posix_fallocate", "fsync", "fdatasync"])
def test_full_at_every_write_then_resume(
    function: str,
    target: str,
    source: Path,
    want: dict[str, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    untouched, out = tree(source), tmp_path / "out"
    staging = tmp_path / "out.w4pack-staging"
    for after in range(1000):
        with monkeypatch.context() as patch:
            fault = Fault(getattr(os, function), after, staging)
            patch.setattr(os, function, fault)
            done = convert(source, out, target, *SHARDS)
        if done.code == 0:
            break
        check_full(done, out)
        convert(source, out, target, *SHARDS, "--resume").expect(0)
        assert tree(out) == want[target], after
        assert not staging.exists()
        shutil.rmtree(out)
    assert after == fault.calls > 3, "the fault was put in at every call"
    assert tree(out) == want[target]
    assert tree(source) == untouched


def test_full_for_several_threads_is_still_one_error(
    source: Path, want: dict[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ("--max-shard-size", "20KB", "--threads", "4")
    for after in (5, 9, 14):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", Fault(os.pwrite, after, tmp_path / "out.w4pack-staging"))
            check_full(convert(source, out, "marlin", *words), out)
    convert(source, out, "marlin", *words, "--resume").expect(0)
    assert tree(out) == want["marlin"]


def test_text_form_is_short(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Fault(os.pwrite, 6, tmp_path / "out.w4pack-staging"))
        done = run("convert", source, out, *SHARDS, "-q").expect(1, "bytes free", "--resume")
    assert done.err.startswith("error: the disk is full\n")
    assert len(done.err.splitlines()) < 9
    assert done.out == ""


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO])
def test_quota_and_device_errors_keep_the_work_too(
    number: int,
    source: Path,
    want: dict[str, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Fault(os.pwrite, 9, tmp_path / "out.w4pack-staging", number))
        done = convert(source, out, "marlin", *SHARDS).expect(1)
    assert done.error["code"] == ("disk-full" if number == errno.EDQUOT else "cannot-write")
    assert str(out) in done.error["where"]
    assert (tmp_path / "out.w4pack-staging").is_dir()
    assert not out.exists()
    convert(source, out, "marlin", *SHARDS, "--resume").expect(0)
    assert tree(out) == want["marlin"]


def test_full_while_unpacking(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source, tmp_path / "art", "marlin").expect(0)
    run("unpack", tmp_path / "art", tmp_path / "want").expect(0)
    back = tmp_path / "back"
    for after in (0, 4, 9):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", Fault(os.pwrite, after, tmp_path / "back.w4pack-staging"))
            run("unpack", tmp_path / "art", back, "--json").expect(1, "bytes free", "disk-full")
        assert not back.exists()
    run("unpack", tmp_path / "art", back, "--resume").expect(0)
    assert tree(back) == tree(tmp_path / "want")


# --- a real file system of few MB -------------------------------------------------------------------------


def mounted(folder: Path, options: str) -> bool:
    """Mount or remount a tmpfs; False where that is not allowed."""
    words = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted(folder, "size=20m"):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)


def test_a_disk_that_is_too_small_is_known_before_the_first_byte(source: Path, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes((19 << 20) + (700 << 10)))
    free = shutil.disk_usage(small_disk).free
    done = convert(source, small_disk / "out", "marlin").expect(1, "bytes free")
    assert f"{free:,}" in done.error["found"]
    assert sorted(p.name for p in small_disk.iterdir()) == ["filler"]


def test_a_disk_that_fills_up_later(
    source: Path, want: dict[str, dict[str, str]], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody takes the room, all but a few KiB of it, between the check and the first write."""
    out, filler = small_disk / "out", small_disk / "filler"
    from w4pack.convert.jobs import staged

    real, room = staged.check_disk, 0

    def check_then_fill(*rest: Any) -> None:
        real(*rest)
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - (room << 10)))

    for room in range(0, 256, 12):
        with monkeypatch.context() as patch:
            patch.setattr(staged, "check_disk", check_then_fill)
            done = convert(source, out, "marlin", *SHARDS)
        filler.unlink()
        if done.code == 0:
            break
        done.expect(1, "bytes free")
        assert done.error["code"] == "disk-full"
        assert not out.exists()
        convert(source, out, "marlin", *SHARDS, "--resume").expect(0)
        assert tree(out) == want["marlin"], room
        assert sorted(p.name for p in small_disk.iterdir()) == ["out"]
        shutil.rmtree(out)
    assert 60 < room < 255, "the output is about 80 KB of weights and 50 KB beside them"
    assert tree(out) == want["marlin"]
