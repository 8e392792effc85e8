"""Runs the ``console`` blocks of a page and shows what the commands print. ``make docs`` calls it.

A block holds commands (lines that start with ``$ ``), each followed by its output. The commands of one page
run in one scratch folder with a copy of ``examples/``; ``# exit 3`` behind a command names its exit code.
Commands of a block without any output stay without.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_RUN = ("make", "git", "pip")  # what CI runs anyway, or what needs an index
# What differs from run to run or from machine to machine: times, rates, free space.
VOLATILE = (r"\([\d.]+ \w+ free\)", r"in [\d.]+s \([\d.]+ \w+/s\)", r"about [\dms. ]+s")

ANY_ORDER = ": re-quantized, relative error"


def pages() -> list[Path]:
    """Return the pages whose commands run: README and everything below docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def stable(text: str) -> str:
    """Return ``text`` without what differs from run to run; lines that come in any order are sorted."""
    for pattern in VOLATILE:
        text = re.sub(pattern, "~", text)
    lines = text.splitlines()
    places = [i for i, line in enumerate(lines) if ANY_ORDER in line]
    for i, line in zip(places, sorted(lines[i] for i in places), strict=True):
        lines[i] = line
    return "\n".join(lines)


def scratch(folder: Path) -> dict[str, str]:
    """Fill ``folder`` with ``examples/`` and a ``w4pack`` command; return the environment to run in."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "bin").mkdir()
    command = folder / "bin" / "w4pack"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m w4pack "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def run(line: str, folder: Path, environ: dict[str, str]) -> str:
    """Run one command, return what it prints. Raises RuntimeError if its exit code is not the named one."""
    wanted = re.search(r"#\s*exit (\d+)", line)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != int(wanted[1] if wanted else 0):
        raise RuntimeError(f"$ {line}\nexit {done.returncode}\n{done.stdout}")
    return done.stdout


def refreshed(text: str, folder: Path) -> str:
    """Return a page's text with the output of its commands as it is now, unchanged if only times differ."""
    environ: dict[str, str] = {}

    def block(match: re.Match[str]) -> str:
        lines = match[1].splitlines()
        commands = [line[2:] for line in lines if line.startswith("$ ")]
        if not commands or commands[0].split()[0] in NOT_RUN:
            return match[0]
        environ.update(environ or scratch(folder))
        printed = [(line, run(line, folder, environ)) for line in commands]
        silent = len(lines) == len(commands)
        body = "".join(f"$ {line}\n{'' if silent else out}" for line, out in printed)
        return match[0] if stable(body) == stable(match[1]) else f"```console\n{body}```"

    return BLOCK.sub(block, text)


def main() -> None:
    """Write every page whose commands print something else now."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            new = refreshed(text, Path(folder))
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote the output of the commands in {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
