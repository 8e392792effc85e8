"""The commands against a Hub on loopback, as processes: read in place, convert from it, push to it."""

import json
from pathlib import Path
from typing import Any

import pytest

MAIN = "import sys; from w4pack.cli import main; sys.argv[0] = 'w4pack'; main()"


@pytest.fixture
def command(run_child: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command line; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        process = run_child(MAIN, *args, env=env)
        said, err = process.communicate(timeout=120)
        assert "Traceback" not in err
        return process.returncode, said, err

    return run


@pytest.fixture
def model(hub: Any, demo: Path) -> dict[str, bytes]:
    """The demo checkpoint as a repository, with a card, a stray weight file and a licence."""
    files = {p.name: p.read_bytes() for p in demo.iterdir() if p.is_file()}
    files["README.md"] = b"---\nlicense: mit\nbase_model: meta/Base\n---\n# demo\n"
    files["LICENSE"] = b"free\n"
    files["pytorch_model.bin"] = b"\x80" * 5000
    hub.add("ORG/demo", files)
    return files


def test_inspect_reads_headers_and_says_how_much(
    hub: Any, model: dict[str, bytes], command: Any, demo: Path
) -> None:
    code, said, err = command("inspect", "ORG/demo")
    assert code == 0, err
    assert "reading from the Hub: ORG/demo" in err
    code, said, err = command("inspect", "ORG/demo", "--json")
    found = json.loads(said)
    _, local, _ = command("inspect", str(demo), "--json")
    assert found["layers"] == json.loads(local)["layers"]
    assert 0 < found["bytes_read"] <= sum(map(len, model.values()))
    assert found["evidence"] in ("all", "sample")
    assert hub.count("GET", "pytorch_model.bin") == 0


def test_check_answers_from_the_hub(hub: Any, model: dict[str, bytes], command: Any) -> None:
    code, said, err = command("check", "ORG/demo", "--engine", "vllm", "--tp", "1", "--json")
    assert code in (0, 3), err
    answer = json.loads(said)
    assert (answer["path"], answer["engine"]) == ("ORG/demo", "vllm")
    assert answer["bytes_read"] > 0


def test_convert_from_the_hub_records_the_commit_and_never_a_path(
    hub: Any, model: dict[str, bytes], command: Any, tmp_path: Path
) -> None:
    code, _, err = command("convert", "ORG/demo", "out")
    assert code == 0, err
    head = hub.repos["ORG/demo"].head
    manifest = (tmp_path / "out" / "w4pack.json").read_text()
    assert json.loads(manifest)["source"]["origin"] == {"id": "ORG/demo", "revision": head}
    assert str(tmp_path) not in manifest
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\nbase_model: ORG/demo\nbase_model_relation: quantized\n")
    assert str(tmp_path) not in card
    assert (tmp_path / "out" / "README.source.md").read_bytes() == model["README.md"]
    assert (tmp_path / "out" / "LICENSE").read_bytes() == model["LICENSE"]
    assert hub.count("GET", "pytorch_model.bin") == 0


def test_a_revision_given_twice_is_a_usage_error(hub: Any, command: Any) -> None:
    code, said, err = command("inspect", "ORG/demo@main", "--revision", "main")
    assert (code, said) == (2, "")
    assert "the revision is given twice" in err
    assert hub.calls == []


def test_a_missing_folder_and_a_missing_repository(hub: Any, command: Any) -> None:
    code, _, err = command("inspect", "./none")
    assert (code, err.splitlines()[0]) == (1, "error: no such folder")
    assert hub.calls == []
    code, _, err = command("inspect", "ORG/none")
    assert code == 1
    assert "no such repository on the Hub" in err


def test_push_uploads_what_convert_has_written(hub: Any, demo: Path, command: Any, tmp_path: Path) -> None:
    assert command("convert", str(demo), "out")[0] == 0
    code, said, err = command("push", "out", "tester/demo-marlin")
    assert code == 0, err
    assert hub.url + "/tester/demo-marlin" in said + err
    files = {
        p.relative_to(tmp_path / "out").as_posix(): p.read_bytes()
        for p in (tmp_path / "out").rglob("*")
        if p.is_file()
    }
    pushed = {k: v for k, v in hub.repos["tester/demo-marlin"].tree.items() if k != ".gitattributes"}
    assert pushed == files
    assert "Verified:" in pushed["README.md"].decode()


def test_what_the_hub_warns_of_in_a_card_is_told_in_both_forms(hub: Any, demo: Path, command: Any) -> None:
    hub.card_warnings.append("language: no such code")
    assert command("convert", str(demo), "out")[0] == 0
    code, said, err = command("push", "out", "tester/text")
    assert (code, "warning: language: no such code" in err.splitlines()) == (0, True), said + err
    code, said, err = command("push", "out", "tester/json", "--json")
    told = [event for event in map(json.loads, said.splitlines()) if event["event"] == "warning"]
    assert [(w["code"], w["where"], w["text"]) for w in told] == [
        ("card", "tester/json: README.md", "language: no such code")
    ]
    assert (code, err) == (0, "")


def test_convert_with_push_to_asks_before_it_works(
    hub: Any, demo: Path, command: Any, tmp_path: Path
) -> None:
    hub.add("ORG/locked", {}, read_only=True)
    code, _, err = command("convert", str(demo), "out", "--push-to", "ORG/locked")
    assert code == 1
    assert "pass `create_pr=1`" in err
    assert not (tmp_path / "out").exists()
    code, _, err = command("convert", str(demo), "out", "--push-to", "tester/new", "--private")
    assert code == 0, err
    assert hub.repos["tester/new"].private
    assert "config.json" in hub.repos["tester/new"].tree


def test_a_converted_repository_is_read_and_verified_like_a_folder(
    hub: Any, demo: Path, command: Any, tmp_path: Path
) -> None:
    assert command("convert", str(demo), "out")[0] == 0
    assert command("push", "out", "tester/made")[0] == 0
    code, said, err = command("inspect", "tester/made", "--json")
    assert code == 0, err
    assert json.loads(said)["format"] == json.loads(command("inspect", "out", "--json")[1])["format"]
    code, _, err = command("unpack", "tester/made", "back")
    assert code == 0, err
    assert (tmp_path / "back" / "config.json").read_bytes() == (demo / "config.json").read_bytes()


def test_generate_refuses_what_is_no_artifact_before_it_is_downloaded(
    hub: Any, model: dict[str, bytes], command: Any
) -> None:
    code, said, err = command("generate", "ORG/demo", "She was", "--device", "cpu")
    assert (code, said) == (3, "") and "not a w4pack artifact" in err
    assert hub.count("GET", "config.json") == 1 and hub.count("GET", "safetensors|cdn") == 0


def test_generate_runs_an_artifact_from_the_hub(hub: Any, demo: Path, command: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from w4pack.convert import convert

    convert(demo, tmp_path / "artifact")
    hub.add("ORG/packed", {p.name: p.read_bytes() for p in (tmp_path / "artifact").iterdir()})
    given = ("She was", "--max-new-tokens", "3", "--device", "cpu")
    code, said, err = command("generate", "ORG/packed", *given, env={"OMP_NUM_THREADS": "1"})
    assert code == 0, err
    assert "reading from the Hub: ORG/packed" in err
    local = command("generate", "artifact", *given, env={"OMP_NUM_THREADS": "1"})
    assert (local[0], local[1]) == (0, said)
