"""Calibration text from a data set on the Hub: which files, which column, what is recorded or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from w4pack.convert.errors import HubError, SourceError, UsageError
from w4pack.convert.hub import texts


def lines(*rows: Any) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


BOOKS = {
    "README.md": b"# books",
    "data/train-00000-of-00002.jsonl": lines({"text": "one"}, {"text": "two", "id": 7}),
    "data/train-00001-of-00002.jsonl": lines({"text": "three"}),
    "data/test-00000-of-00001.jsonl": lines({"text": "no", "title": "yes"}),
    "training.txt": b"not of this split: another word",
}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("hub:ORG/books", ("ORG/books", None, "train", "text")),
        ("hub:ORG/books:test", ("ORG/books", None, "test", "text")),
        ("hub:ORG/books@abc:test:title", ("ORG/books", "abc", "test", "title")),
    ],
)
def test_what_a_name_means(spec: str, expected: tuple[Any, ...]) -> None:
    found = texts.parse(spec)
    assert (found.repo_id, found.revision, found.split, found.column) == expected


@pytest.mark.parametrize(
    "spec", ["hub:", "hub:books", "hub:a/b/c", "hub:ORG/x@", "hub:ORG/x:", "hub:ORG/x:a:b:c"]
)
def test_what_is_no_name(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        texts.parse(spec)
    assert caught.value.where == "--calibration" and caught.value.found == spec


def test_the_files_of_a_split_in_their_order(hub: Any) -> None:
    repo = hub.add("ORG/books", BOOKS)
    found, name = texts.read("hub:ORG/books", 1000)
    assert found == ["one", "two", "three"]
    assert name == f"hub:ORG/books@{repo.head}:train:text"
    assert texts.read("hub:ORG/books:test:title", 1000)[0] == ["yes"]


def test_no_more_is_downloaded_than_there_is_need_for(hub: Any) -> None:
    hub.add("ORG/books", BOOKS)
    assert texts.read("hub:ORG/books", 5)[0] == ["one", "two"]
    assert hub.count("GET", "train-00000") == 1 and hub.count("GET", "train-00001") == 0


def test_a_revision_is_what_is_read_and_recorded(hub: Any) -> None:
    repo = hub.add("ORG/books", BOOKS)
    first = repo.head
    repo.commit({"train.txt": b"new text"})
    assert texts.read(f"hub:ORG/books@{first}", 1000)[0] == ["one", "two", "three"]
    assert texts.read("hub:ORG/books", 1000) == (["new text"], f"hub:ORG/books@{repo.head}:train:text")


def test_a_parquet_file_is_preferred_and_needs_its_reader(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "find_spec", lambda name: None)
    hub.add("ORG/books", {**BOOKS, "data/train-0.parquet": b"PAR1"})
    with pytest.raises(UsageError) as caught:
        texts.read("hub:ORG/books", 10)
    assert caught.value.code == "extra-missing" and caught.value.hint == "pip install pyarrow"


def test_a_parquet_file_gives_its_column(hub: Any, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow import parquet

    table = arrow.table({"text": ["one", None, "two"], "id": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "x.parquet")
    hub.add(
        "ORG/books", {"train.parquet": (tmp_path / "x.parquet").read_bytes(), "bad/test.parquet": b"PAR1"}
    )
    assert texts.read("hub:ORG/books", 1000)[0] == ["one", "two"]
    with pytest.raises(UsageError) as caught:
        texts.read("hub:ORG/books:train:body", 1000)
    assert caught.value.found == "text, id"
    with pytest.raises(SourceError):
        texts.read("hub:ORG/books:test", 1000)


@pytest.mark.parametrize(
    ("files", "spec", "error", "found"),
    [
        (BOOKS, "hub:ORG/books:validation", UsageError, "data/test-00000-of-00001.jsonl"),
        (BOOKS, "hub:ORG/books:test:body", UsageError, "text, title"),
        ({"train.jsonl": b"[1]"}, "hub:ORG/books", SourceError, None),
        ({"train.txt": b"\xff\xfe"}, "hub:ORG/books", SourceError, "no UTF-8"),
        ({"train.txt": b" \n"}, "hub:ORG/books", UsageError, None),
        ({"a.csv": b"text"}, "hub:ORG/books", UsageError, "2 files of other kinds"),
        (BOOKS, "hub:ORG/other", HubError, None),
    ],
)
def test_what_is_refused(
    files: dict[str, bytes], spec: str, error: type[Exception], found: str | None, hub: Any
) -> None:
    hub.add("ORG/books", files)
    with pytest.raises(error) as caught:
        texts.read(spec, 1000)
    assert found is None or found in str(caught.value.found)  # type: ignore[attr-defined]


def test_a_model_is_calibrated_with_it_and_records_the_commit(hub: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from quantize import sources
    from runner import run

    source = sources.save(sources.llama(num_hidden_layers=1), tmp_path / "src")
    book = sources.text(tmp_path / "book.txt").read_text()
    half = len(book) // 2
    repo = hub.add("ORG/books", {"train.jsonl": lines({"text": book[:half]}, {"text": book[half:]})})
    words = ("--quantize", "gptq", "--group-size", 32, "--samples", 4, "--seqlen", 64, "--threads", 1, "-q")
    run("convert", source, tmp_path / "hub", "--calibration", "hub:ORG/books", *words).expect(0)
    run("convert", source, tmp_path / "file", "--calibration", tmp_path / "book.txt", *words).expect(0)
    one, two = (json.loads((tmp_path / name / "w4pack.json").read_text()) for name in ("hub", "file"))
    record, plain = one["quantization"]["calibration"], two["quantization"]["calibration"]
    assert record["source"] == f"hub:ORG/books@{repo.head}:train:text" and plain["source"] == "book.txt"
    assert record["digest"] == plain["digest"]
    assert one["options"]["quantize"]["calibration"] == record["source"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hub", "file")]
    assert weights[0] == weights[1]
