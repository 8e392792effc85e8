"""Links lead somewhere, commands run, and nothing private is on a page.

Fenced blocks tagged ``console`` are executed: lines that start with ``$ `` are commands, run in one scratch
folder per page in which ``examples/`` lies; ``# exit 3`` behind a command names its exit code; what they
print is what the page shows (``docs/console.py``). Blocks tagged ``sh`` are not executed (they name models or
folders of the reader), but the w4pack commands and options in them must exist.
"""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

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
    lines = [line for body in blocks(page, "sh") for line in body.splitlines()]
    lines += [line for body in blocks(page, "console") for line in body.splitlines() if line.startswith("$ ")]
    parts = [part for line in lines for part in re.split(r"\|\||&&|[|;]", line.removeprefix("$ "))]
    words = [shlex.split(part, comments=True) for part in parts if part.strip().startswith("w4pack ")]
    return [w[1:] for w in words]


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    for words in said_commands(page):
        if not words or words[0].startswith("-"):
            continue
        options = {w.partition("=")[0] for w in words[1:] if re.match(r"--?[a-z]", w)}
        assert options <= options_of(words[0]), words


def docs_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_commands(page: str) -> bool:
    return any(line.startswith("$ ") for body in blocks(page, "console") for line in body.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if has_commands(page)])
def test_console_commands_run_and_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    """Every command runs with the exit code that stands behind it; times and free space may differ."""
    console = docs_module("console")
    assert ROOT / page in console.pages(), "`make docs` does not know this page"
    again = console.refreshed(text_of(page), tmp_path)
    assert console.stable(again) == console.stable(text_of(page)), "run `make docs`"


def test_a_wrong_exit_code_or_output_is_noticed(tmp_path: Path) -> None:
    console = docs_module("console")
    with pytest.raises(RuntimeError, match="exit 1"):
        console.refreshed("```console\n$ false\n```\n", tmp_path / "a")
    shown = "```console\n$ echo new   # exit 0\nold\n```\n"
    assert console.refreshed(shown, tmp_path / "b") == shown.replace("old", "new")
    assert console.refreshed(shown.replace("old", "new"), tmp_path / "c") == shown.replace("old", "new")


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_no_absolute_path_of_a_machine(page: str) -> None:
    assert re.findall(r"(?<![\w.])/(?:home|root|opt|work|tmp)/\w+", text_of(page)) == []
