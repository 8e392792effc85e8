"""A signal while the command is still being imported ends it as at any other time: line and exit code."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from w4pack import __main__
from w4pack.cli import _errors
from w4pack.convert.exits import Terminated, interrupted

# The command gets a signal when a module is about to be imported.
EARLY = """
import os, sys
number, name = int(sys.argv.pop(1)), sys.argv.pop(1)
class Finder:
    def find_spec(self, found, path=None, target=None):
        if found == name:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Finder())
from w4pack.__main__ import main
sys.argv[0] = "w4pack"
main()
"""
MODULES = ["w4pack.cli", "click", "click.core", "w4pack.convert.errors", "w4pack.convert.streams"]


def early(number: int, module: str, *words: str, ignored: bool = False) -> subprocess.CompletedProcess[str]:
    handler = signal.SIG_IGN if ignored else signal.SIG_DFL
    return subprocess.run(
        [sys.executable, "-c", EARLY, str(number), module, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_modules_are_imported(number: int, code: int, module: str) -> None:
    done = early(number, module, "inspect", "none")
    assert (done.returncode, done.stderr, done.stdout) == (code, "error: stopped by a signal\n", "")


EXEC = """
import sys
from w4pack import __main__, cli
def stopped(**given):
    with cli._errors(given):
        exec("raise KeyboardInterrupt")
cli.root.commands["inspect"].callback = stopped
sys.argv = ["w4pack", "inspect", "none"]
__main__.main()
"""


def test_ctrl_c_within_an_exec_ends_with_the_same_exit_code(tmp_path: Path) -> None:
    """As dataclasses are made. A module that is run with -m would die of the signal, with -2."""
    (tmp_path / "stopped.py").write_text(EXEC)
    done = subprocess.run(
        [sys.executable, "-m", "stopped"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (130, "error: stopped by a signal\n")


def test_with_json_it_is_the_event_of_any_other_time() -> None:
    done = early(signal.SIGINT, "click", "inspect", "none", "--json")
    assert done.returncode == 130 and done.stderr == ""
    assert json.loads(done.stdout) == {"schema": 1, **interrupted(130).to_json()}
    assert json.loads(__main__.EVENT.format(code=143)) == {"schema": 1, **interrupted(143).to_json()}


def test_a_job_in_the_background_that_ignores_ctrl_c_goes_on() -> None:
    done = early(signal.SIGINT, "click", "--help", ignored=True)
    assert done.returncode == 0 and "Exit codes" in done.stdout


@pytest.mark.parametrize(("signalled", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_signal_that_became_another_error_is_no_bug(
    signalled: type[BaseException], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Python 3.12 one that comes while a class is made is the cause of a RuntimeError."""

    def imported() -> None:
        try:
            raise signalled
        except BaseException as err:
            raise RuntimeError("Error calling __set_name__ on 'cached_property' instance") from err

    with pytest.raises(SystemExit) as left, _errors({}):
        imported()
    assert (left.value.code, capsys.readouterr().err) == (code, "error: stopped by a signal\n")
