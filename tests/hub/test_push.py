"""Row F42 and what belongs to it: an upload that is cut, limited or refused; never loadable half-way.

The expected tree is always the bytes of the folder; what was sent is counted by the server.
"""

import hashlib
import json
import os
import random
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from w4pack.convert.errors import HubError, OutputError, UsageError, VerifyError
from w4pack.convert.hub import outfolder
from w4pack.convert.hub.access import preflight
from w4pack.convert.hub.card import CardInfo, model_card
from w4pack.convert.hub.push import push

SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
CARD = "---\nlicense: apache-2.0\n---\n# model\n"


def shard(name: str, size: int, seed: int) -> bytes:
    header = json.dumps({name: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + random.Random(seed).randbytes(size)


def manifest_of(files: dict[str, bytes], **more: Any) -> bytes:
    """A manifest that names every tensor of the shards, and config.json, hashed here."""
    tensors = {}
    for data in (d for n, d in files.items() if n.endswith(".safetensors")):
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            sha = hashlib.sha256(data[8 + length :]).hexdigest()
            tensors[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "sha256": sha}
    tool = {"name": "w4pack", "version": "0", "format": 1}
    value = {"schema": 1, "tool": tool, "target": "dense", "options": {}, "lossless": True}
    config = hashlib.sha256(files["config.json"]).hexdigest()
    value |= {"source": {}, "files": {"config.json": config}}
    return json.dumps({**value, "layers": {}, "tensors": tensors, **more}).encode()


def files_of(seed: int = 0) -> dict[str, bytes]:
    index = {"metadata": {}, "weight_map": {f"t{i}": name for i, name in enumerate(SHARDS)}}
    shards = {name: shard(f"t{i}", 20_000 + i, seed + i) for i, name in enumerate(SHARDS)}
    config = json.dumps({"seed": seed}).encode()
    return {
        **shards,
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": config,
        "w4pack.json": manifest_of({**shards, "config.json": config}),
        "tokenizer.json": b"t" * 9000,
        "chat/template.jinja": b"{{ x }}",
        "README.md": CARD.encode(),
    }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write(tmp_path / "out", files_of())


def tree(hub: Any, repo_id: str = "tester/model") -> dict[str, bytes]:
    return {name: data for name, data in hub.repos[repo_id].tree.items() if name != ".gitattributes"}


def never_loadable_half_way(hub: Any, old: dict[str, bytes] | None = None) -> None:
    """Wherever config.json is, the tree is whole: the new one, or the one from before."""
    commits = [
        {k: v for k, v in t.items() if k != ".gitattributes"} for _, t in hub.repos["tester/model"].commits
    ]
    whole = [commits[-1], *([old] if old is not None else [])]
    assert all(t in whole for t in commits if "config.json" in t)


# ---- the plain way


def test_a_new_repository_gets_the_folder_weights_first_and_config_last(hub: Any, out: Path) -> None:
    report = push(out, "tester/model")
    assert tree(hub) == files_of()
    never_loadable_half_way(hub)
    assert set(report.sent) == set(files_of())
    assert (report.kept, report.removed, report.commits) == ((), (), 4)
    assert report.bytes_sent == sum(map(len, files_of().values()))
    assert report.commit == hub.repos["tester/model"].head
    commits = [set(t) for _, t in hub.repos["tester/model"].commits]
    assert SHARDS[0] in commits[1] and "w4pack.json" in commits[1]
    assert "config.json" not in commits[-2] and set(SHARDS) <= commits[-2]
    assert hub.leaks == 0


def test_a_second_push_of_the_same_sends_and_commits_nothing(hub: Any, out: Path) -> None:
    push(out, "tester/model")
    before = (hub.sent("PUT", ""), len(hub.repos["tester/model"].commits))
    report = push(out, "tester/model")
    assert (report.sent, report.commits, report.bytes_sent) == ((), 0, 0)
    assert set(report.kept) == set(files_of())
    assert (hub.sent("PUT", ""), len(hub.repos["tester/model"].commits)) == before


def test_a_changed_text_is_one_commit(hub: Any, out: Path) -> None:
    push(out, "tester/model")
    (out / "README.md").write_text(CARD + "more\n")
    report = push(out, "tester/model")
    assert (report.sent, report.commits) == (("README.md",), 1)
    assert tree(hub)["README.md"] == (CARD + "more\n").encode()


def test_another_model_in_the_same_repository_is_never_mixed_with_the_old(hub: Any, out: Path) -> None:
    push(out, "tester/model")
    write(out, files_of(seed=10))
    report = push(out, "tester/model")
    assert tree(hub) == files_of(seed=10)
    never_loadable_half_way(hub, files_of())
    assert set(report.kept) == {
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat/template.jinja",
        "README.md",
    }


def test_shards_of_an_earlier_push_are_removed(hub: Any, out: Path, tmp_path: Path) -> None:
    push(out, "tester/model")
    single = {"model.safetensors": shard("t", 5000, 5), "config.json": b"{}"}
    single["w4pack.json"] = manifest_of(single)
    report = push(write(tmp_path / "single", single), "tester/model")
    assert set(report.removed) == {*SHARDS, "model.safetensors.index.json"}
    kept = {
        k: v for k, v in files_of().items() if k in ("tokenizer.json", "chat/template.jinja", "README.md")
    }
    assert tree(hub) == {**single, **kept}
    never_loadable_half_way(hub, files_of())


def test_weights_of_others_are_not_touched(hub: Any, out: Path) -> None:
    repo = hub.add("tester/model", {"pytorch_model.bin": b"x" * 9000, "config.json": b"{}"})
    with pytest.raises(HubError) as caught:
        push(out, "tester/model")
    assert (caught.value.code, caught.value.found) == ("other-weights", "pytorch_model.bin")
    assert len(repo.commits) == 1


def test_many_shards_make_a_bounded_number_of_commits(hub: Any, tmp_path: Path) -> None:
    names = [f"model-{i:05d}-of-00120.safetensors" for i in range(1, 121)]
    index = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
    files = {name: shard(f"t{i}", 10, i) for i, name in enumerate(names)}
    files |= {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    report = push(write(tmp_path / "many", files), "tester/model")
    assert report.commits == 40 + 1
    assert tree(hub) == files


def test_an_organization_and_a_private_repository(hub: Any, out: Path) -> None:
    push(out, "ORG/model", private=True)
    assert hub.repos["ORG/model"].private
    assert tree(hub, "ORG/model") == files_of()


# ---- faults that pass, on every call

CALLS = [
    ("GET", r"/api/whoami-v2"),
    ("POST", r"/api/validate-yaml"),
    ("GET", r"/api/models/tester/model"),
    ("POST", r"/api/repos/create"),
    ("POST", r"/preupload/main"),
    ("GET", r"/tree/"),
    ("POST", r"/objects/batch"),
    ("PUT", r"^/objects/"),
    ("POST", r"/objects/verify"),
    ("POST", r"/commit/main"),
]
FAULTS = {
    "429": {"status": 429, "headers": {"Retry-After": "1"}},
    "503 three times": {"status": 503, "times": 3},
    "dropped before": {"status": None},
    "dropped after it took effect": {"status": None, "when": "after"},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("method", "path"), CALLS)
def test_a_fault_that_passes_ends_in_the_same_tree(
    hub: Any, quick: list[float], out: Path, method: str, path: str, fault: str
) -> None:
    made = hub.fault(method, path, **FAULTS[fault])
    push(out, "tester/model")
    assert made.times == 0
    assert tree(hub) == files_of()
    never_loadable_half_way(hub)
    assert len(hub.repos["tester/model"].commits) == 1 + 4  # no commit landed twice
    assert quick and sum(quick) < 60
    if fault == "429":
        assert any(1.0 <= pause <= 2.5 for pause in quick)


def test_a_drop_in_the_middle_sends_only_that_file_again(hub: Any, quick: list[float], out: Path) -> None:
    hub.fault("PUT", r"^/objects/", None, after=7000)
    push(out, "tester/model")
    assert tree(hub) == files_of()
    sizes = sorted(c.size for c in hub.calls if c.method == "PUT")
    lengths = [len(data) for name, data in files_of().items() if name in SHARDS or name == "tokenizer.json"]
    assert sizes == sorted([7000, *lengths])


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: Any, quick: list[float], out: Path) -> None:
    hub.fault("POST", r"/commit/main", None, when="after", times=2)
    report = push(out, "tester/model")
    assert len(hub.repos["tester/model"].commits) == 1 + report.commits == 5


# ---- refusals


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("method", "path"), CALLS)
def test_a_refusal_that_stays_is_asked_once_and_shown(
    hub: Any, quick: list[float], out: Path, method: str, path: str, status: int
) -> None:
    hub.fault(method, path, status, times=-1, text="storage quota of the planet exceeded")
    with pytest.raises(HubError) as caught:
        push(out, "tester/model")
    assert caught.value.exit_code == 1
    assert "storage quota of the planet exceeded" in str(caught.value) or path.endswith("whoami-v2")
    assert hub.count(method, path.removeprefix("^")) == 1
    assert quick == []
    assert all("config.json" not in repo.tree for repo in hub.repos.values())


def test_a_lost_race_is_tried_once_more(hub: Any, quick: list[float], out: Path) -> None:
    fault = hub.fault("POST", r"/commit/main", 412)
    push(out, "tester/model")
    assert fault.times == 0
    assert tree(hub) == files_of()


def test_a_real_commit_of_someone_else_is_taken_as_the_new_parent(hub: Any, out: Path) -> None:
    """The other one commits between our look at the head and our commit."""
    repo = hub.add("tester/model", {})
    original = hub.cdn.RequestHandlerClass.route

    def other(handler: Any) -> None:
        original(handler)
        hub.cdn.RequestHandlerClass.route = original
        repo.commit({**repo.tree, "NOTES.md": b"theirs"})

    hub.cdn.RequestHandlerClass.route = other
    push(out, "tester/model")
    assert hub.count("POST", "/commit/main") == 5
    assert tree(hub) == {**files_of(), "NOTES.md": b"theirs"}


def test_a_branch_that_keeps_moving_ends_the_push(hub: Any, quick: list[float], out: Path) -> None:
    hub.fault("POST", r"/commit/main", 412, times=-1)
    with pytest.raises(HubError) as caught:
        push(out, "tester/model")
    assert caught.value.code == "branch-moved"
    assert hub.count("POST", "/commit/main") == 2


def test_a_fault_that_stays_ends_in_bounded_time(hub: Any, quick: list[float], out: Path) -> None:
    hub.fault("POST", r"/commit/main", 503, times=-1)
    with pytest.raises(HubError) as caught:
        push(out, "tester/model")
    assert caught.value.code == "server-fault"
    assert 30 < sum(quick) < 600
    hub.faults.clear()
    sent = hub.sent("PUT", "")
    push(out, "tester/model")
    assert tree(hub) == files_of()
    whole = sum(len(files_of()[name]) for name in SHARDS) + 9000
    assert hub.sent("PUT", "") == whole and sent == len(files_of()[SHARDS[0]])


# ---- before the work


def test_preflight_says_who_where_and_whether_it_is_new(hub: Any) -> None:
    access = preflight("tester/model", card=CARD)
    assert (access.user, access.created, access.private) == ("tester", True, False)
    assert access.head == hub.repos["tester/model"].head
    assert preflight("tester/model").created is False
    assert tree(hub) == {}


def test_preflight_needs_a_token(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError) as caught:
        preflight("tester/model")
    assert (caught.value.code, hub.calls) == ("no-token", [])


def test_preflight_refuses_a_token_the_hub_does_not_know(hub: Any) -> None:
    with pytest.raises(HubError) as caught:
        preflight("tester/model", token="hf_unknownToken")
    assert caught.value.code == "unauthorized"
    assert "hf_unknownToken" not in str(caught.value)


def test_preflight_refuses_a_token_that_only_reads(hub: Any) -> None:
    hub.role = "read"
    with pytest.raises(HubError) as caught:
        preflight("tester/model")
    assert (caught.value.code, len(hub.calls)) == ("forbidden", 1)


def test_preflight_finds_a_repository_that_may_only_be_read(hub: Any) -> None:
    """Creating it would be answered with "it exists"; only the request to upload tells."""
    repo = hub.add("ORG/model", {}, read_only=True)
    hub.role = "fineGrained"
    with pytest.raises(HubError) as caught:
        preflight("ORG/model")
    assert caught.value.code == "forbidden"
    assert "pass `create_pr=1`" in str(caught.value)
    assert len(repo.commits) == 1


def test_preflight_finds_a_namespace_of_others(hub: Any) -> None:
    with pytest.raises(HubError) as caught:
        preflight("others/model")
    assert (caught.value.code, hub.repos) == ("forbidden", {})


def test_preflight_finds_a_card_the_hub_does_not_take(hub: Any) -> None:
    with pytest.raises(HubError) as caught:
        preflight("tester/model", card="---\nlicense: 3\n---\n")
    assert caught.value.code == "card"
    assert "license: 3" in str(caught.value.found)
    assert hub.repos == {}  # before anything is created


def test_preflight_keeps_private_private(hub: Any) -> None:
    hub.add("tester/model", {})
    with pytest.raises(HubError) as caught:
        preflight("tester/model", private=True)
    assert caught.value.code == "not-private"


@pytest.mark.parametrize("name", ["model", "a/b/c", "../x", "tester/", "tester/a--b"])
def test_a_name_that_is_none_is_a_usage_error(hub: Any, name: str) -> None:
    with pytest.raises(UsageError):
        preflight(name)
    assert hub.calls == []


# ---- the folder


def test_a_folder_without_config_is_no_output(hub: Any, out: Path) -> None:
    (out / "config.json").unlink()
    with pytest.raises(OutputError) as caught:
        push(out, "tester/model")
    assert (caught.value.code, hub.calls) == ("not-an-output", [])


def test_a_missing_shard_is_found_before_the_first_request(hub: Any, out: Path) -> None:
    (out / SHARDS[1]).unlink()
    with pytest.raises(OutputError) as caught:
        push(out, "tester/model")
    assert SHARDS[1] in str(caught.value)
    assert hub.calls == []


def test_f43_a_file_above_the_hubs_limit_is_refused(
    hub: Any, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outfolder.FILE_LIMIT == 50_000_000_000
    monkeypatch.setattr(outfolder, "FILE_LIMIT", (out / SHARDS[1]).stat().st_size)
    with pytest.raises(OutputError) as caught:
        push(out, "tester/model")
    assert SHARDS[2] in str(caught.value.where)
    assert "--max-shard-size" in str(caught.value.hint)
    assert hub.calls == []


def test_a_broken_output_is_not_uploaded(hub: Any, out: Path) -> None:
    data = bytearray((out / SHARDS[1]).read_bytes())
    data[-1] ^= 1
    (out / SHARDS[1]).write_bytes(data)
    with pytest.raises(VerifyError) as caught:
        push(out, "tester/model")
    assert "t1" in str(caught.value.where)
    assert (hub.count("PUT", ""), hub.count("POST", "/commit/")) == (0, 0)


def test_the_verification_is_in_the_card_that_is_pushed(hub: Any, out: Path) -> None:
    info = CardInfo(target="marlin", version="0", lossless=True, source_format="gptq", schemes=())
    (out / "README.md").write_text(model_card(info))
    push(out, "tester/model")
    card = tree(hub)["README.md"].decode()
    assert "Verified: 3 tensors are present" in card and "Not verified" not in card
    assert (out / "README.md").read_text() == card
    assert push(out, "tester/model").commits == 0


def test_hidden_files_stay_at_home(hub: Any, out: Path) -> None:
    write(out, {".cache/x": b"1", ".env": b"SECRET=1"})
    push(out, "tester/model")
    assert tree(hub) == files_of()


# ---- a process that is killed

PUSH = """
import sys
from w4pack.convert.hub.push import push
from w4pack.convert.errors import W4PackError
try:
    report = push(sys.argv[1], "tester/model")
    print(report.commits, len(report.sent), len(report.kept))
except W4PackError as err:
    print(err, file=sys.stderr)
    sys.exit(err.exit_code)
"""


@pytest.mark.parametrize(
    ("method", "path", "nth"),
    [
        ("PUT", r"^/objects/", 2),
        ("POST", r"/commit/main", 1),
        ("POST", r"/commit/main", 3),
        ("POST", r"/objects/verify", 1),
    ],
)
def test_after_kill_9_a_rerun_ends_with_the_same_tree(
    hub: Any, run_child: Any, out: Path, method: str, path: str, nth: int
) -> None:
    gate = threading.Event()
    hub.fault(method, path, times=nth - 1, when="never")
    hold = hub.fault(method, path, 503, wait=gate)
    process = run_child(PUSH, str(out))
    deadline = time.monotonic() + 60
    while hold.times and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    gate.set()
    assert hold.times == 0
    assert "config.json" not in tree(hub)
    complete = set(hub.objects)

    before = len(hub.calls)
    again = run_child(PUSH, str(out))
    _, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert tree(hub) == files_of()
    never_loadable_half_way(hub)
    resent = {c.path.rpartition("/")[2] for c in hub.calls[before:] if c.method == "PUT"}
    assert not resent & complete  # files that were complete are not sent twice


def test_with_xet_on_and_a_server_without_it_plain_http_is_used(hub: Any, run_child: Any, out: Path) -> None:
    process = run_child(PUSH, str(out), env={"HF_HUB_DISABLE_XET": "0"})
    said, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert tree(hub) == files_of()
    assert said.split()[0] == "4"


def test_the_token_is_in_no_output(hub: Any, run_child: Any, out: Path) -> None:
    from_env = "hf_loopbackTokenForTests"
    hub.fault("POST", r"/commit/main", 403, times=-1, text=f"token {from_env} may not")
    process = run_child(PUSH, str(out), env={"HF_DEBUG": ""})
    said, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "may not" in err
    assert from_env not in said + err
