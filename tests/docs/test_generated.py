"""The generated pages are what the code says now, and name everything a user can type."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]


def pages() -> dict[str, Callable[[], str]]:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Callable[[], str]] = module.PAGES
    return found


@pytest.mark.parametrize("name", ["reference/cli.md", "reference/errors.md", "reference/engine-rules.md"])
def test_page_is_up_to_date(name: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == pages()[name](), "run `make docs`"


def test_every_command_and_option_is_in_the_reference() -> None:
    from w4pack import cli

    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    (root,) = (value for value in vars(cli).values() if isinstance(value, click.Group))
    for name, command in root.commands.items():
        section = text.partition(f"## w4pack {name}\n")[2].partition("\n## ")[0]
        missing = [
            o
            for p in command.params
            if isinstance(p, click.Option)
            for o in p.opts
            if f"`{o}`" not in section
        ]
        assert missing == [], name


def test_every_error_class_is_in_the_reference() -> None:
    from w4pack.convert import errors

    text = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    names = [n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.W4PackError)]
    assert [n for n in names if f"`{n}`" not in text] == []
