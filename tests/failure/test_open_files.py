"""No file can be opened any more, or what was written cannot be read back: nothing is left lying."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner import convert, run

DEMO = Path(__file__).parents[2] / "examples" / "demo-gptq"
STAGING = "out.w4pack-staging"


def failing(real: Callable[..., Any], ending: str, number: int) -> Callable[..., Any]:
    """Return ``os.open`` for which files with such a name cannot be opened."""

    def opened(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(ending):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest, **more)

    return opened


@pytest.mark.parametrize("ending", ["journal.jsonl", ".safetensors"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES])
def test_a_run_that_could_not_begin_leaves_no_folder(
    number: int, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(os.open, f"{STAGING}/out/model{ending}", number))
        if ending == "journal.jsonl":
            patch.setattr(os, "open", failing(os.open, ending, number))
        error = convert(DEMO, tmp_path / "out", "marlin").expect(1).error
    assert error["code"] == "cannot-write" and os.strerror(number).lower() in error["what"]
    assert (error["hint"] is None) == (number == errno.EACCES)
    assert number == errno.EACCES or "ulimit -n" in error["hint"]
    assert not list(tmp_path.iterdir())
    convert(DEMO, tmp_path / "out", "marlin", "--resume").expect(0)


def test_an_earlier_run_s_work_stays_when_a_file_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # the weights are written and journaled, config.json is not
        patch.setattr(os, "open", failing(os.open, "/out/config.json", errno.EMFILE))
        convert(DEMO, tmp_path / "out", "marlin").expect(1, "--resume")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing(os.open, ".safetensors", errno.EMFILE))
        convert(DEMO, tmp_path / "out", "marlin", "--resume").expect(1)
    done = convert(DEMO, tmp_path / "out", "marlin", "--resume").expect(0)
    notes = [e["text"] for e in done.events if e["event"] == "note"]
    (steps,) = (text.split()[1:4:2] for text in notes if text.startswith("resumed: "))
    assert steps[0] == steps[1]  # all of them


def test_a_published_output_leaves_no_folder_where_nothing_can_be_opened_for_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*args: Any, **more: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", no_more)
        convert(DEMO, tmp_path / "out", "marlin").expect(0)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_what_cannot_be_read_back_is_no_bug(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def unreadable(fd: int, *rest: Any) -> int:
        if STAGING in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(number, os.strerror(number))
        return real(fd, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", unreadable)
        error = convert(DEMO, tmp_path / "out", "marlin", "--threads", 1).expect(1).error
    assert (error["code"], error["found"]) == ("cannot-read-back", os.strerror(number).lower())
    assert error["where"].endswith(".safetensors") and "--resume" in error["hint"]
    convert(DEMO, tmp_path / "out", "marlin", "--resume").expect(0)
    run("verify", tmp_path / "out", "--against", DEMO).expect(0)


@pytest.mark.parametrize("most", [8, 14])
def test_a_real_limit_of_a_process_is_no_bug(most: int, tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    words = [sys.executable, "-m", "w4pack", "convert", DEMO, tmp_path / "out", "-q"]
    done = subprocess.run(
        list(map(str, words)), preexec_fn=limited, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1) and "a bug" not in done.stderr and "Traceback" not in done.stderr
    staging = tmp_path / STAGING
    assert (done.returncode == 0) == (tmp_path / "out").exists()
    assert not staging.exists() or (staging / "journal.jsonl").stat().st_size > 0
