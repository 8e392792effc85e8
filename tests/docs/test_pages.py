"""Links lead somewhere, commands run, and nothing private is on a page.

Fenced blocks tagged ``console`` are executed: lines that start with ``$ `` are commands, run in one scratch
folder per page in which ``examples/`` lies; ``# exit 3`` behind a command names its exit code. Blocks tagged
``sh`` are not executed (they name models or folders of the reader), but the w4pack commands and options in
them must exist.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    p.relative_to(ROOT).as_posix()
    for p in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("*/README.md"),
    )
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, tag: str) -> list[str]:
    return [body for found, body in FENCE.findall(text_of(page)) if found == tag]


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, by the rule of the usual Markdown hosts."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower().replace("`", "")).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_internal_links_resolve(page: str) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = ROOT / page if not file else (ROOT / page).parent / file
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def options_of(verb: str) -> set[str]:
    from w4pack import cli

    (root,) = (value for value in vars(cli).values() if isinstance(value, click.Group))
    command = root.commands[verb]
    own = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    return own | {"-h", "--help"}


def said_commands(page: str) -> list[list[str]]:
    """The w4pack commands of ``sh`` and ``console`` blocks, as words."""
    lines = [line for tag in ("sh", "console") for body in blocks(page, tag) for line in body.splitlines()]
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines if "w4pack " in line]
    return [w[w.index("w4pack") + 1 :] for w in words if "w4pack" in w]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    for words in said_commands(page):
        if not words or words[0].startswith("-"):
            continue
        options = {w.partition("=")[0] for w in words[1:] if re.match(r"--?[a-z]", w)}
        assert options <= options_of(words[0]), words


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A folder with ``examples/`` and a ``w4pack`` on the path."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "w4pack"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m w4pack "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return tmp_path


def prompt_lines(page: str) -> list[str]:
    return [
        line[2:] for body in blocks(page, "console") for line in body.splitlines() if line.startswith("$ ")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if prompt_lines(page)])
def test_console_commands_run_as_written(page: str, scratch: Path) -> None:
    environ = {**os.environ, "PATH": f"{scratch / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for line in prompt_lines(page):
        if line.split()[0] in ("make", "git", "pip"):
            continue  # what CI runs anyway, or what needs an index
        wanted = re.search(r"#\s*exit (\d+)", line)
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=scratch,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == int(wanted[1] if wanted else 0), f"$ {line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_no_absolute_path_of_a_machine(page: str) -> None:
    assert re.findall(r"(?<![\w.])/(?:home|root|opt|work|tmp)/\w+", text_of(page)) == []
