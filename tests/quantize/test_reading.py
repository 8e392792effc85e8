"""Calibration text is read as far as it is needed, and gives the tokens that the whole file gives."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import run
from w4pack.convert.errors import UsageError
from w4pack.convert.quantize import calibration, texts
from w4pack.convert.quantize.calibration import Calibration, calibrate


class Words:
    """A tokenizer whose token of a word depends on all of its letters: a word that is cut is another one."""

    def __init__(self) -> None:
        self.letters = 0

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        self.letters += len(text)
        sha = (hashlib.sha256(word.encode()).digest() for word in text.split())
        return {"input_ids": [int.from_bytes(value[:2], "big") for value in sha]}


def made(path: Path, *, samples: int = 4, seqlen: int = 50, seed: int = 0) -> tuple[Calibration, int]:
    """Return a calibration, and the letters that were tokenized for it."""
    words = Words()
    return calibrate(str(path), words, samples=samples, seqlen=seqlen, seed=seed), words.letters


def prose(words: int) -> str:
    numbers = np.random.default_rng(3).integers(0, 10**9, words)
    return " ".join("x" * (n % 17) + str(n) for n in numbers.tolist())


def whole(text: list[str], samples: int, seqlen: int, seed: int) -> str:
    """Return the digest of the windows by the rules, from all tokens."""
    ids = np.concatenate([Words()(t)["input_ids"] for t in text])
    rows = ids[: ids.size // seqlen * seqlen].reshape(-1, seqlen)
    picked = rows[[(seed * samples + i) % len(rows) for i in range(min(samples, len(rows)))]]
    return hashlib.sha256(picked.astype("<i4").tobytes()).hexdigest()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this size count as long."""
    monkeypatch.setattr(calibration, "LEAST", 1000)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_one_long_text_gives_the_tokens_of_the_whole_text(seed: int, tmp_path: Path) -> None:
    text = prose(20_000)
    (tmp_path / "t.txt").write_text(text)
    found, letters = made(tmp_path / "t.txt", seed=seed)
    assert found.record()["digest"] == whole([text], 4, 50, seed)
    assert letters < len(text) / 4


@pytest.mark.usefixtures("small")
def test_tokens_of_many_letters_only_make_it_read_more(tmp_path: Path) -> None:
    """64 letters a word: eight times what is read at first."""
    text = " ".join(f"{n:064d}" for n in range(8000))
    (tmp_path / "t.txt").write_text(text)
    found, _ = made(tmp_path / "t.txt", seed=1)
    assert found.record()["digest"] == whole([text], 4, 50, 1)


def test_a_word_that_the_first_part_cuts_is_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 characters for each of 200 tokens end within the last of 200 words."""
    monkeypatch.setattr(calibration, "LEAST", 1)
    text = " ".join(["abcdefghijk", *(f"{n:07d}" for n in range(5000))])
    assert len(text[:1600].split()) == 200 and not text[:1600].endswith(" ")
    (tmp_path / "t.txt").write_text(text)
    assert made(tmp_path / "t.txt")[0].record()["digest"] == whole([text], 4, 50, 0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("samples", "seed"), [(4, 7), (90, 0), (500, 2)])
def test_a_text_that_ends_before_the_windows_do_goes_round(samples: int, seed: int, tmp_path: Path) -> None:
    text = prose(1234)
    (tmp_path / "t.txt").write_text(text)
    found, _ = made(tmp_path / "t.txt", samples=samples, seed=seed)
    assert found.record()["digest"] == whole([text], samples, 50, seed)


@pytest.mark.parametrize(("samples", "seed"), [(4, 0), (4, 2), (30, 9)])
def test_lines_give_the_tokens_of_all_lines(samples: int, seed: int, tmp_path: Path) -> None:
    lines = [prose(30 + n) for n in range(40)]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    found, _ = made(tmp_path / "t.jsonl", samples=samples, seed=seed)
    assert found.record()["digest"] == whole(lines, samples, 50, seed)


def test_no_line_behind_the_windows_is_read(tmp_path: Path) -> None:
    good = json.dumps({"text": prose(300)})
    (tmp_path / "t.jsonl").write_bytes(f"{good}\n".encode() + b"\xff no JSON, and no UTF-8\n" * 20_000)
    assert made(tmp_path / "t.jsonl")[0].tokens == 200
    with pytest.raises(UsageError) as caught:  # the windows of the next seed lie there
        made(tmp_path / "t.jsonl", seed=1)
    assert caught.value.where == str(tmp_path / "t.jsonl")


def test_a_large_file_of_lines_is_not_in_memory(tmp_path: Path) -> None:
    line = json.dumps({"text": prose(400)}) + "\n"
    with (tmp_path / "t.jsonl").open("w") as file:
        for _ in range(4000):
            file.write(line)
    size = (tmp_path / "t.jsonl").stat().st_size
    tracemalloc.start()
    try:
        made(tmp_path / "t.jsonl")
        texts.Texts(str(tmp_path / "t.jsonl")).check()
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 20 << 20 and used < 2 << 20


def test_a_text_is_read_no_further_than_asked_for(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes("\ufeffä b c d".encode())
    found = texts.Texts(str(tmp_path / "t.txt"), 3)
    assert list(found) == ["ä b"] and found.cut
    found = texts.Texts(str(tmp_path / "t.txt"), 7)
    assert list(found) == ["ä b c d"] and not found.cut
    assert list(texts.Texts(str(tmp_path / "t.txt"), 10**30)) == ["ä b c d"]


def test_the_ends_of_lines_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"a\r\nb\rc\n")
    assert list(texts.Texts(str(tmp_path / "t.txt"))) == ["a\r\nb\rc\n"]


@pytest.fixture
def lines(tmp_path: Path, book: Path) -> Path:
    """A good line, then one that is none."""
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"text": book.read_text()}) + "\n[]\n")
    return path


def test_measuring_reads_its_windows_alone(llama: Path, lines: Path) -> None:
    words = ("eval", llama, "--text", lines, "--seqlen", 32, "--threads", 1, "--json")
    assert run(*words, "--windows", 2).expect(0).data["scored"] == 2 * 31
    error = run(*words, "--windows", 10_000).expect(2).error
    assert error["where"] == f"{lines}: line 2"
