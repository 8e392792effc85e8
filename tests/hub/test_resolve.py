"""What a source argument means, and which files of a repository are fetched."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from w4pack.convert.errors import HubError, SourceError, UsageError
from w4pack.convert.hub.resolve import HubSource, LocalSource, commit_of, parse_source, snapshot


def tensors(**sizes: int) -> bytes:
    """A safetensors file of U8 tensors, written by hand."""
    header: dict[str, Any] = {}
    at = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(at)


def index(**files: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": files}).encode()


# ---- the argument


@pytest.mark.parametrize(
    "text",
    [
        "/none",
        "./none",
        "../a/b",
        "~/none/x",
        "a/b/c",
        ".",
        "~none",
        "a/b/c@main",
        "a\0b/c",
        "a/" + "b" * 5000,
    ],
)
def test_what_can_only_be_a_path_is_never_a_hub_id(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text == ".":
        assert parse_source(text) == LocalSource(Path(), ".")
        return
    with pytest.raises(SourceError, match="no such folder") as caught:
        parse_source(text)
    assert (caught.value.code, caught.value.exit_code, caught.value.where) == ("no-such-folder", 1, text)
    assert caught.value.hint is None


def test_one_word_that_is_no_folder_says_how_a_hub_id_is_written() -> None:
    with pytest.raises(SourceError, match="no such folder") as caught:
        parse_source("mymodel")
    assert "ORG/NAME" in str(caught.value.hint)


def test_an_existing_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ORG" / "NAME").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_source("ORG/NAME") == LocalSource(Path("ORG/NAME"), "ORG/NAME")
    assert parse_source("ORG/OTHER") == HubSource("ORG/OTHER", None)


def test_a_folder_with_an_at_sign_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ORG" / "NAME@v1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse_source("ORG/NAME@v1"), LocalSource)


@pytest.mark.parametrize(
    ("text", "option", "revision"),
    [("ORG/NAME", None, None), ("ORG/NAME@refs/pr/3", None, "refs/pr/3"), ("ORG/NAME", "v2", "v2")],
)
def test_a_revision_comes_from_the_id_or_from_the_option(
    text: str, option: str | None, revision: str | None
) -> None:
    source = parse_source(text, option)
    assert source == HubSource("ORG/NAME", revision)
    assert source.label == ("ORG/NAME" if revision is None else f"ORG/NAME@{revision}")
    assert source.notice.startswith("reading from the Hub: ORG/NAME")


@pytest.mark.parametrize(
    ("text", "option", "code"),
    [
        ("ORG/NAME@a", "b", "two-revisions"),
        ("ORG/NAME@a", "a", "two-revisions"),
        ("ORG/NAME@", None, "empty-revision"),
    ],
)
def test_a_revision_that_is_given_twice_or_empty_is_a_usage_error(
    text: str, option: str | None, code: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source(text, option)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)


def test_a_revision_for_a_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source(str(tmp_path), "main")
    assert caught.value.code == "revision-of-folder"


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SourceError) as caught:
        parse_source(str(tmp_path / "model.safetensors"))
    assert caught.value.code == "not-a-folder"


# ---- the download

TWO_SHARDS = {
    "model-00001-of-00002.safetensors": tensors(a=5000),
    "model-00002-of-00002.safetensors": tensors(b=6000),
    "model.safetensors.index.json": index(
        a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors"
    ),
}
SIDES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"t": 1}',
    "code/modeling.py": b"x = 1\n",
    "README.md": b"# a\n",
}
STRAYS = {
    "model.safetensors": tensors(a=9),
    "pytorch_model.bin": b"p",
    "onnx/model.onnx": b"o",
    "x.gguf": b"g",
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_only_what_the_index_names_and_side_files_are_fetched(hub: Any) -> None:
    repo = hub.add("ORG/NAME", {**TWO_SHARDS, **SIDES, **STRAYS})
    folder = snapshot(HubSource("ORG/NAME", None), quiet=True)
    assert files_of(folder) == {**TWO_SHARDS, **SIDES}
    assert commit_of(folder) == repo.head
    assert hub.leaks == 0


def test_without_an_index_the_single_file_is_fetched(hub: Any) -> None:
    files = {"model.safetensors": tensors(a=9), "config.json": b"{}", "pytorch_model.bin": b"p"}
    hub.add("ORG/NAME", files)
    assert set(files_of(snapshot(HubSource("ORG/NAME", None)))) == {"model.safetensors", "config.json"}


def test_a_name_with_brackets_is_no_pattern(hub: Any) -> None:
    files = {"model[1].safetensors": tensors(a=9), "config.json": b"{}"}
    hub.add("ORG/NAME", files)
    assert files_of(snapshot(HubSource("ORG/NAME", None))) == files


def test_a_revision_is_fetched_by_name_and_by_commit(hub: Any) -> None:
    repo = hub.add("ORG/NAME", {"model.safetensors": tensors(a=9), "config.json": b"old"})
    first = repo.head
    repo.commit({**repo.tree, "config.json": b"new"})
    assert (snapshot(HubSource("ORG/NAME", first)) / "config.json").read_bytes() == b"old"
    assert (snapshot(HubSource("ORG/NAME", "main")) / "config.json").read_bytes() == b"new"


def test_the_cache_answers_without_the_network(hub: Any, tmp_path: Path) -> None:
    hub.add("ORG/NAME", {**TWO_SHARDS, **SIDES})
    cache = tmp_path / "mine"
    folder = snapshot(HubSource("ORG/NAME", None), cache_dir=cache)
    calls = len(hub.calls)
    assert snapshot(HubSource("ORG/NAME", None), cache_dir=cache, local_files_only=True) == folder
    assert len(hub.calls) == calls
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(HubError) as caught:
        snapshot(HubSource("ORG/NAME", None), cache_dir=cache, local_files_only=True)
    assert caught.value.code == "not-complete"
    assert "model-00002-of-00002.safetensors" in str(caught.value.found)


def test_local_files_only_without_a_cache_says_so(hub: Any) -> None:
    with pytest.raises(HubError) as caught:
        snapshot(HubSource("ORG/NAME", None), local_files_only=True)
    assert (caught.value.code, caught.value.exit_code) == ("not-cached", 1)
    assert hub.calls == []


@pytest.mark.parametrize(
    ("repo_id", "revision", "code"),
    [("ORG/NONE", None, "no-repository"), ("ORG/NAME", "nope", "no-revision"), ("ORG/GATED", None, "gated")],
)
def test_what_the_hub_refuses_is_said_in_words(
    hub: Any, repo_id: str, revision: str | None, code: str
) -> None:
    hub.add("ORG/NAME", {"model.safetensors": tensors(a=9)})
    hub.add("ORG/GATED", {"model.safetensors": tensors(a=9)}, gated=True)
    with pytest.raises(HubError) as caught:
        snapshot(HubSource(repo_id, revision))
    assert caught.value.code == code
    assert repo_id in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_bad_token_is_named_and_never_printed(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    hub.add("ORG/NAME", {"model.safetensors": tensors(a=9)})
    with pytest.raises(HubError) as caught:
        snapshot(HubSource("ORG/NAME", None))
    assert caught.value.code == "unauthorized"
    assert "hf_expired" not in str(caught.value)


def test_faults_that_pass_are_waited_for(hub: Any, quick: list[float]) -> None:
    hub.add("ORG/NAME", {**TWO_SHARDS, **SIDES})
    hub.fault("GET", r"/api/models/ORG/NAME", 503, times=2)
    hub.fault("GET", r"/api/models/ORG/NAME", 429, headers={"Retry-After": "1"})
    assert files_of(snapshot(HubSource("ORG/NAME", None))) == {**TWO_SHARDS, **SIDES}
    assert 1.0 in quick


def test_no_network_is_said_in_words(
    quick: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(HubError) as caught:
        snapshot(HubSource("ORG/NAME", None))
    assert caught.value.code == "unreachable"


def test_the_environment_of_the_client_works(hub: Any, run_child: Any, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE, read by the client at its import."""
    hub.add("ORG/NAME", {**TWO_SHARDS, **SIDES}, private=True)
    code = (
        "import sys; from w4pack.convert.hub.resolve import *; from w4pack.convert.errors import *\n"
        "try: print(snapshot(HubSource(sys.argv[1], None)))\n"
        "except W4PackError as err: print(err.code)\n"
    )
    env = {"HF_HUB_CACHE": str(tmp_path / "there")}
    out, err = run_child(code, "ORG/NAME", env=env).communicate(timeout=60)
    assert out.startswith(str(tmp_path / "there")), err
    calls = len(hub.calls)
    again, err = run_child(code, "ORG/NAME", env={**env, "HF_HUB_OFFLINE": "1"}).communicate(timeout=60)
    assert again == out, err
    other, err = run_child(code, "ORG/OTHER", env={**env, "HF_HUB_OFFLINE": "1"}).communicate(timeout=60)
    assert other == "not-cached\n", err
    assert len(hub.calls) == calls
