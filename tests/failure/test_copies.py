"""`verify --against` compares every file that is promised to be a copy, not only weights and configs."""

import json
import shutil
from pathlib import Path

import pytest

from runner import run

DEMO = Path(__file__).parents[2] / "examples" / "demo-gptq"
COPIES = {
    "tokenizer.json": None,
    "tokenizer_config.json": None,
    "generation_config.json": None,
    "chat_template.jinja": "{{ messages }}",
    "modeling_own.py": "ANSWER = 42",
    "assets/merges.txt": "a b",
    "README.md": "# The model",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("copies") / "src"))
    for name, text in COPIES.items():
        if text is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def art(source: Path) -> Path:
    out = source.parent / "art"
    run("convert", source, out, "-q").expect(0)
    return out


@pytest.fixture(scope="module")
def back(art: Path) -> Path:
    out = art.parent / "back"
    run("unpack", art, out, "-q").expect(0)
    return out


def differing(folder: Path, source: Path) -> set[tuple[str, str]]:
    """Return what `verify --against` finds, with its exit code checked."""
    done = run("verify", folder, "--against", source, "--json")
    assert done.code == (0 if done.data["ok"] else 4)
    return {(f["tensor"], f["kind"]) for f in done.data["failures"]}


def forged(art: Path, out: Path, name: str, text: str | None) -> Path:
    """Copy an output with one file changed or gone, and a manifest that agrees with it."""
    shutil.copytree(art, out)
    value = json.loads((out / "w4pack.json").read_text())
    if text is None:
        (out / name).unlink()
        del value["files"][name]
    else:
        import hashlib

        (out / name).write_text(text)
        value["files"][name] = hashlib.sha256(text.encode()).hexdigest()
    (out / "w4pack.json").write_text(json.dumps(value))
    return out


def test_untouched_ones_are_equal(source: Path, art: Path, back: Path) -> None:
    for folder in (art, back):
        assert differing(folder, source) == set()


@pytest.mark.parametrize("name", COPIES)
def test_a_plain_folder_with_another_file(name: str, source: Path, back: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(back, tmp_path / "other"))
    (other / name).write_bytes((other / name).read_bytes() + b" ")
    assert differing(other, source) == {(name, "file")}
    (other / name).unlink()
    assert differing(other, source) == {(name, "missing")}


def test_a_plain_folder_with_a_file_more(source: Path, back: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(back, tmp_path / "other"))
    (other / "added_tokens.json").write_text("{}")
    assert differing(other, source) == {("added_tokens.json", "extra")}


@pytest.mark.parametrize("name", COPIES)
def test_an_output_whose_manifest_agrees(name: str, source: Path, art: Path, tmp_path: Path) -> None:
    """Without a source the hashes are all there is; beside it the copies are compared themselves."""
    kept = "README.source.md" if name == "README.md" else name
    other = forged(art, tmp_path / "other", kept, "another")
    run("verify", other).expect(0)
    assert differing(other, source) == {(kept, "file")}
    gone = forged(art, tmp_path / "gone", kept, None)
    assert differing(gone, source) == {(kept, "missing")}


def test_our_own_card_and_files_that_stay_behind_are_no_copies(
    source: Path, art: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(art, tmp_path / "other"))
    (other / "README.md").write_text("edited, as a publisher does")
    (other / ".gitattributes").write_text("*.safetensors filter=lfs")
    assert differing(other, source) == set()


def test_a_source_that_w4pack_wrote(source: Path, tmp_path: Path) -> None:
    """Its cards are ours: the first source's card goes on, and comes back under its own name."""
    one, two, back = tmp_path / "one", tmp_path / "two", tmp_path / "back"
    run("convert", source, one, "--to", "gptq", "--regroup", "-q").expect(0)
    run("convert", one, two, "-q").expect(0)
    run("unpack", two, back, "-q").expect(0)
    assert differing(two, one) == set()
    assert differing(back, one) == set()
    assert (back / "README.md").read_text() == COPIES["README.md"]
