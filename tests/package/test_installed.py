"""The wheel in a fresh environment, outside the checkout, without torch: what a user of the converter has."""

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from package.conftest import Built, Command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(built: "Built", command: "Command", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel and its requirements. Needs a package index."""
    base = tmp_path_factory.mktemp("installed")
    command(sys.executable, "-m", "venv", base / "venv", cwd=base)
    command(base / "venv/bin/python", "-m", "pip", "install", "--quiet", built.wheel, cwd=base)
    return base / "venv/bin"


def test_requirements_are_complete_and_consistent(
    installed: Path, command: "Command", tmp_path: Path
) -> None:
    assert "No broken requirements" in command(installed / "python", "-m", "pip", "check", cwd=tmp_path)


def test_every_module_imports_without_torch(installed: Path, command: "Command", tmp_path: Path) -> None:
    script = """
import importlib, pkgutil, sys
import w4pack, w4pack.convert, w4pack.kernels
names = ["w4pack.cli"]
for package in (w4pack.convert, w4pack.kernels):
    names += [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as err:  # the kernels' operators are torch's; the converter never is
        if err.name != "torch" or not name.startswith("w4pack.kernels."):
            raise
assert importlib.util.find_spec("torch") is None, "the base install has torch"
print(len(names))
"""
    assert int(command(installed / "python", "-c", script, cwd=tmp_path)) > 20


def test_help_and_version_run(installed: Path, command: "Command", tmp_path: Path) -> None:
    assert command(installed / "w4pack", "--help", cwd=tmp_path).startswith("Usage: w4pack")
    assert "0.1.0" in command(installed / "w4pack", "--version", cwd=tmp_path)
    assert command(installed / "python", "-m", "w4pack", "-h", cwd=tmp_path).startswith("Usage: w4pack")


def test_the_installed_command_converts_and_proves(
    installed: Path, command: "Command", demo: Path, tmp_path: Path
) -> None:
    shutil.copytree(demo, tmp_path / "demo")
    w4pack = installed / "w4pack"
    command(w4pack, "convert", "demo", "out", "--to", "marlin", "-q", cwd=tmp_path)
    command(w4pack, "verify", "out", "--against", "demo", cwd=tmp_path)
    assert (tmp_path / "out" / "w4pack.json").is_file()


def test_the_installed_command_generates_on_a_cpu(
    installed: Path, command: "Command", demo: Path, tmp_path: Path
) -> None:
    """torch and transformers come from this interpreter: added behind the environment's own packages."""
    torch = pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    site = next((installed.parent / "lib").glob("python*/site-packages"))
    (site / "runtime.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    shutil.copytree(demo, tmp_path / "demo")
    try:
        command(installed / "w4pack", "convert", "demo", "out", "-q", cwd=tmp_path)
        given = ("generate", "out", "She was", "--max-new-tokens", "4", "--device", "cpu", "--json")
        found = json.loads(command(installed / "w4pack", *given, cwd=tmp_path))
        where = command(installed / "python", "-c", "import w4pack; print(w4pack.__file__)", cwd=tmp_path)
    finally:
        (site / "runtime.pth").unlink()
    assert str(site) in where
    assert (found["device"], found["new_tokens"] > 0) == ("cpu", True)
