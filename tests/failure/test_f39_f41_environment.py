"""Files, links, names and what is installed: rows F39 to F41 of the failure list."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from failure.folders import accepted, folder, refused, tree, with_header

import builders as b
import oracle
from runner import convert, run

# --- F39: the environment ---------------------------------------------------------------------------------


def test_f39_too_little_room_is_known_before_the_first_byte(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    real = os.statvfs(tmp_path)
    free = 12345
    tight = os.statvfs_result((1, 1, real.f_blocks, free, free, *tuple(real)[5:]))
    with mock.patch("os.statvfs", return_value=tight):
        done = convert(source, tmp_path / "out", "marlin").expect(1, free)
    assert not (tmp_path / "out").exists()
    total = sum(len(t.data) for t in oracle.read_folder(source).values())
    assert any(abs(int(x) - total) < total * 0.2 for x in digits(done.text)), "the bytes needed"


def digits(text: str) -> list[str]:
    """Return every whole number of a text."""
    import re

    return re.findall(r"\d+", text.replace(",", ""))


UNPRIVILEGED = 65534  # nobody


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Give up root's right to read and write everything, for a while; others have nothing to give."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(UNPRIVILEGED)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter (pytest's own are private)."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


def test_f39_unreadable_shard(open_folder: Path) -> None:
    source = folder(open_folder / "src", shards=2)
    shard = source / "model-00001-of-00002.safetensors"
    shard.chmod(0)
    with without_root():
        convert(source, open_folder / "out", "marlin").expect(1, shard.name)
    assert not (open_folder / "out").exists()


def test_f39_read_only_parent(open_folder: Path) -> None:
    source, parent = folder(open_folder / "src"), open_folder / "parent"
    parent.mkdir(mode=0o555)
    with without_root():
        convert(source, parent / "out", "marlin").expect(1, "parent")
    assert not list(parent.iterdir())


def test_f39_weights_that_are_a_folder(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").mkdir()
    convert(source, tmp_path / "out", "marlin").expect(1, "src")


def test_f39_out_must_be_new_or_empty(tmp_path: Path) -> None:
    source, out = folder(tmp_path / "src"), tmp_path / "out"
    out.mkdir()
    accepted(source, out)
    before = tree(out)
    convert(source, out, "marlin").expect(1, "out", "--overwrite")
    assert tree(out) == before
    (out / "stray.txt").write_text("x")
    accepted(source, out, "--overwrite")
    assert tree(out) == before
    assert not list(tmp_path.glob("out.w4pack*"))


def test_f39_out_inside_source(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    before = tree(source)
    for out in (source / "out", source, source / "a" / ".." / "out"):
        convert(source, out, "marlin", "--overwrite").expect(1, "src")
        assert tree(source) == before


@pytest.mark.parametrize("command", ["convert", "inspect", "check", "verify", "unpack"])
def test_f39_no_such_folder(command: str, tmp_path: Path) -> None:
    words: list[str | Path] = [command, tmp_path / "nowhere"]
    if command in ("convert", "unpack"):
        words.append(tmp_path / "out")
    run(*words).expect(1, "nowhere")


def test_f39_an_old_output_is_put_back_after_a_crash_between_the_renames(tmp_path: Path) -> None:
    source, out = folder(tmp_path / "src"), tmp_path / "out"
    accepted(source, out)
    before = tree(out)
    out.rename(tmp_path / "out.w4pack-old")
    convert(source, out, "marlin").expect(1, "--overwrite")
    assert tree(out) == before


# --- F40: names that escape -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/x", "a/../../x", "sub/x.safetensors", "", ".", ".."]
)
def test_f40_shard_names_are_plain_file_names(shard: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "src", shards=2)
    (tmp_path / "x.safetensors").write_bytes(b.safetensors_bytes({"x": b.dense(np.random.default_rng(0), 2)}))
    index = source / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.norm.weight"] = shard
    b.write_json(index, value)
    refused(source, tmp_path / "out", "model.safetensors.index.json")


def test_f40_link_that_leaves_the_folder(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    outside = tmp_path / "outside.safetensors"
    (source / "model.safetensors").rename(outside)
    (source / "model.safetensors").symlink_to(outside)
    convert(source, tmp_path / "out", "marlin").expect(1, "model.safetensors")
    assert not (tmp_path / "out").exists()


def test_f40_links_of_the_hub_cache_are_followed_and_copied_as_files(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    plain = folder(tmp_path / "plain")
    (plain / "tokenizer.json").write_text("{}")
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in plain.iterdir():
        blob = repo / "blobs" / hashlib.sha256(path.name.encode()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob.name))
    before = tree(repo / "blobs")
    accepted(snapshot, tmp_path / "out")
    assert all(p.is_file() and not p.is_symlink() for p in (tmp_path / "out").rglob("*"))
    copy = tmp_path / "out" / "tokenizer.json"
    assert copy.read_text() == "{}"
    assert copy.stat().st_nlink == 1  # a file of its own: the cache may be emptied
    copy.write_text("changed")
    assert tree(repo / "blobs") == before


def test_f40_side_file_that_links_outside_is_not_copied_silently(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    secret = tmp_path / "secret.txt"
    secret.write_text("do not publish")
    (source / "vocab.txt").symlink_to(secret)
    refused(source, tmp_path / "out", "vocab.txt")
    assert secret.read_text() == "do not publish"


@pytest.mark.parametrize("name", ["../../w", "/etc/passwd", "a\nb", "x" * 5000, "größe"])
def test_f40_tensor_names_are_never_paths(name: str, tmp_path: Path) -> None:
    inside = tmp_path / "deep" / "er"
    inside.mkdir(parents=True)
    extra = {name: b.dense(np.random.default_rng(1), 4, 4)}
    source = folder(inside / "src", extra=extra)
    before = set(tree(tmp_path))
    convert(source, inside / "out", "marlin").expect(0)
    new = {p for p in tree(tmp_path) if p not in before}
    assert all(p.startswith("deep/er/out") for p in new), new
    assert oracle.read_folder(inside / "out")[name] == extra[name]


def test_f40_a_million_empty_tensors_are_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    item = '"t%d":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}'
    text = ("{" + ",".join(item % i for i in range(10**6)) + "}").encode()
    (source / "model.safetensors").write_bytes(with_header(text))
    run("inspect", source, "--json").expect(1, "model.safetensors")


def test_f40_remote_code_is_never_run(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    marker = tmp_path / "ran"
    (source / "configuration_x.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil/repo--configuration_x.XConfig"}
    b.write_json(source / "config.json", config)
    accepted(source, tmp_path / "out")
    for words in (
        ("inspect", source),
        ("check", source),
        ("verify", tmp_path / "out"),
        ("unpack", tmp_path / "out", tmp_path / "u"),
    ):
        run(*words, "--json")
    assert not marker.exists()


# --- F41: no GPU, no torch --------------------------------------------------------------------------------

NO_TORCH = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Wall())
from w4pack.cli import main
sys.argv = ["w4pack", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("command", ["--help", "inspect", "check", "convert", "verify", "unpack"])
def test_f41_every_command_works_without_torch_and_without_a_gpu(command: str, tmp_path: Path) -> None:
    source, out = folder(tmp_path / "src"), tmp_path / "out"
    if command in ("verify", "unpack"):
        convert(source, out, "marlin").expect(0)
    words: dict[str, list[str]] = {
        "--help": ["--help"],
        "inspect": ["inspect", str(source)],
        "check": ["check", str(source), "--engine", "w4pack"],
        "convert": ["convert", str(source), str(out), "--to", "marlin"],
        "verify": ["verify", str(out), "--against", str(source)],
        "unpack": ["unpack", str(out), str(tmp_path / "back")],
    }
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *words[command]],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert "Traceback" not in done.stderr
    wanted = 3 if command == "check" else 0  # it is no artifact yet
    assert done.returncode == wanted, done.stderr


def test_f41_a_bin_source_without_torch_says_what_brings_it(tmp_path: Path) -> None:
    source = folder(tmp_path / "src")
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + b"\0" * 60)
    words = ["convert", str(source), str(tmp_path / "out"), "--to", "marlin"]
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "pip install 'w4pack[quantize]'" in done.stderr
