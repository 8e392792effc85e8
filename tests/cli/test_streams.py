"""stdout that is full, closed or read by nobody, stderr that is; every command, in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import builders as b
from runner import command, signals_act

COMMANDS = {
    "inspect": ["inspect", "SRC"],
    "check": ["check", "MADE", "--engine", "w4pack"],
    "verify --json": ["verify", "MADE", "--json"],
    "convert --dry-run": ["convert", "SRC", "OUT", "--dry-run"],
    "convert --json": ["convert", "SRC", "OUT", "--json"],
    "unpack --json": ["unpack", "MADE", "OUT", "--json"],
    "--help": ["convert", "--help"],
}
FULL = "error: the answer cannot be written\n  where: stdout\n  found: No space left on device\n"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint and its artifact."""
    root = tmp_path_factory.mktemp("streams")
    b.write(root / "src", b.model(3, b.llama_config(vocab_size=64)), b.gptq, b.gptq_config())
    subprocess.run(command("convert", str(root / "src"), str(root / "made"), "-q"), check=True, timeout=60)
    return {"SRC": str(root / "src"), "MADE": str(root / "made")}


def words(name: str, places: dict[str, str], out: Path) -> list[str]:
    return command(*[{**places, "OUT": str(out)}.get(word, word) for word in COMMANDS[name]])


@contextmanager
def unread() -> Iterator[int]:
    """The end of a pipe that nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    yield write_end
    os.close(write_end)


@pytest.mark.parametrize(
    ("name", "unbuffered"), [*((name, "") for name in COMMANDS), ("inspect", "1"), ("convert --json", "1")]
)
def test_a_full_stdout_is_an_error_in_words(
    name: str, unbuffered: str, places: dict[str, str], tmp_path: Path
) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        done = subprocess.run(
            words(name, places, tmp_path / "out"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (done.returncode, done.stderr[-len(FULL) :]) == (1, FULL)
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_stdout_that_nobody_reads_ends_a_command_without_a_word(
    name: str, places: dict[str, str], tmp_path: Path
) -> None:
    with unread() as pipe:
        done = subprocess.run(
            words(name, places, tmp_path / "out"),
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_stdout_that_is_closed_is_dev_null(name: str, places: dict[str, str], tmp_path: Path) -> None:
    """The first file that is opened must not become stdout: its bytes would be mixed with the answer."""
    args = words(name, places, tmp_path / "out")
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *args], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    if name == "convert --json":
        proof = command("verify", str(tmp_path / "out"), "--against", places["SRC"])
        assert subprocess.run(proof, capture_output=True, timeout=60, check=False).returncode == 0


def test_what_stderr_cannot_take_is_dropped(places: dict[str, str], tmp_path: Path) -> None:
    def run(name: str, **streams: object) -> subprocess.CompletedProcess[bytes]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        args = command("convert", places["SRC"], str(out)) if name == "convert" else words(name, places, out)
        return subprocess.run(args, timeout=60, check=False, **streams)  # type: ignore[call-overload]

    with open("/dev/full", "w") as full, unread() as pipe:  # noqa: PTH123 - a device
        for stderr in (full, pipe):
            assert run("convert", stderr=stderr).returncode == 0  # shards and the summary go there
            done = run("inspect", stdout=subprocess.PIPE, stderr=stderr)
            assert (done.returncode, done.stdout[:4]) == (0, b"path")
        assert run("inspect", stdout=full, stderr=full).returncode == 1
        assert run("inspect", stdout=pipe, stderr=pipe).returncode == 0


@pytest.mark.parametrize("stream", ["full", "unread"])
def test_an_error_that_json_cannot_tell_keeps_its_exit_code(stream: str) -> None:
    with open("/dev/full", "w") as full, unread() as pipe:  # noqa: PTH123 - a device
        for args, code in ((("inspect", "nowhere", "--json"), 1), (("convert", "--json"), 2)):
            done = subprocess.run(
                command(*args),
                stdout=full if stream == "full" else pipe,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == code
            told = {1: "no such folder", 2: "Missing argument"}[code] if stream == "full" else ""
            assert told in done.stderr and "Traceback" not in done.stderr
            assert bool(done.stderr) == (stream == "full")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_a_question_in_words(number: signal.Signals, code: int) -> None:
    """The command waits for a Hub that takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.settimeout(60)
        child = subprocess.Popen(
            command("inspect", "org/name", "-q"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"},
            preexec_fn=signals_act,
        )
        with child:
            connection, _ = hub.accept()
            with connection:
                child.send_signal(number)
                try:
                    _, err = child.communicate(timeout=60)
                finally:
                    child.kill()
    assert (child.returncode, err) == (code, "error: stopped by a signal\n")
