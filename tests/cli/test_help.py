"""Every command explains itself, quickly, and in one form."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest

if TYPE_CHECKING:
    from conftest import Runner

VERBS = ("convert", "inspect", "check", "verify", "unpack", "push", "generate", "bench")


DIFFER = {
    "--tp": "check asks about several at once, convert rotates for one",
}


def commands() -> dict[str, click.Command]:
    from w4pack import cli

    groups = [value for value in vars(cli).values() if isinstance(value, click.Group)]
    (root,) = groups
    context = click.Context(root)
    return {name: root.get_command(context, name) for name in root.list_commands(context)}  # type: ignore[misc]


def test_the_verbs_are_there() -> None:
    assert set(VERBS) <= set(commands())


def test_every_command_and_option_has_help() -> None:
    bare = [
        f"{name} {parameter.opts}"
        for name, command in commands().items()
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert bare == []
    assert [name for name, command in commands().items() if not command.help] == []


def test_an_option_means_the_same_wherever_it_appears() -> None:
    """One name: one type and one default."""
    seen: dict[str, set[tuple[Any, ...]]] = {}
    for command in commands().values():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name not in ("help", "version"):
                meaning = (
                    repr(parameter.type),
                    repr(parameter.default),
                    parameter.multiple,
                    parameter.is_flag,
                )
                seen.setdefault(max(parameter.opts, key=len), set()).add(meaning)
    differ = {name for name, meanings in seen.items() if len(meanings) > 1}
    assert differ == set(DIFFER)


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_on_stdout_and_exits_0(verb: str, flag: str, w4pack: "Runner") -> None:
    run = w4pack(*filter(None, [verb, flag]))
    assert (run.code, run.stderr) == (0, "")
    assert run.stdout.startswith("Usage: w4pack")


def test_the_exit_codes_stand_at_the_foot_of_the_help(w4pack: "Runner") -> None:
    foot = w4pack("--help").stdout
    for code in ("0", "1", "2", "3", "4", "130"):
        assert code in foot.partition("xit codes")[2]


def test_version_names_w4pack_and_python(w4pack: "Runner") -> None:
    import platform

    import w4pack as package

    said = w4pack("--version")
    assert said.code == 0
    assert package.__version__ in said.stdout
    assert platform.python_version() in said.stdout


@pytest.mark.parametrize("args", [("nonsense",), ("convert",), ("inspect", ".", "--nonsense")], ids=" ".join)
def test_wrong_usage_is_exit_code_2_on_stderr(args: tuple[str, ...], w4pack: "Runner") -> None:
    run = w4pack(*args)
    assert (run.code, run.stdout) == (2, "")
    assert run.stderr != ""
    assert "Traceback" not in run.stderr


def test_help_works_from_the_checkout_root(repo: Path, w4pack: "Runner") -> None:
    """With the root on ``sys.path``, ``convert`` and ``kernels`` are importable by their bare names."""
    assert w4pack("--help", cwd=repo).code == 0
