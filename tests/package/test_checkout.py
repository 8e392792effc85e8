"""The checkout in development: editable, with links for type checkers, beside a public `kernels`."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from package.conftest import Built, Command


@pytest.mark.slow
def test_an_editable_install_serves_the_checkout_and_lays_relative_links(
    built: "Built", command: "Command", tmp_path: Path
) -> None:
    command(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    # pip and setuptools of the environment under test; a bare path, so its own .pth files stay unread
    base = next(p for p in sys.path if p.endswith("site-packages"))
    site = command(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    ).strip()
    (Path(site) / "base.pth").write_text(base + "\n", encoding="utf-8")
    options = ("--quiet", "--ignore-installed", "--no-deps", "--no-build-isolation")
    command(python, "-m", "pip", "install", *options, "--editable", built.checkout, cwd=tmp_path)

    show = (
        "import w4pack.convert.errors as e, w4pack.kernels.layout as k; print(e.__file__); print(k.__file__)"
    )
    files = command(python, "-c", show, cwd=tmp_path).split()
    assert files == [str(built.checkout / f) for f in ("convert/errors.py", "kernels/layout.py")]

    links = {p.name: p.readlink() for p in (built.checkout / "build/dev/w4pack").iterdir()}
    assert set(links) == {"__init__.py", "__main__.py", "cli.py", "py.typed", "convert", "kernels"}
    assert all(not target.is_absolute() for target in links.values())
    assert (built.checkout / "build/dev/w4pack/convert/errors.py").is_file()


FAKE = '''
"""Stands in for the public package: every name is a class of decorators that change nothing."""
__version__ = "{version}"
class Anything:
    def __init__(self, *args, **kwargs): pass
    def __call__(self, decorated=None, *args, **kwargs): return decorated
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
'''


@pytest.fixture(params=["without", "with"])
def public_kernels(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    """A folder for ``sys.path`` that holds a distribution named ``kernels``, or None."""
    if request.param == "without":
        yield None
        return
    import_utils = pytest.importorskip("transformers.utils.import_utils", reason="needs transformers")
    version = getattr(import_utils, "KERNELS_MIN_VERSION", "0.10.0")
    info = tmp_path / f"kernels-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n", encoding="utf-8"
    )
    (info / "top_level.txt").write_text("kernels\n", encoding="utf-8")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(FAKE.format(version=version), encoding="utf-8")
    yield tmp_path


@pytest.mark.pair
@pytest.mark.slow
def test_transformers_imports_from_the_checkout_root(
    public_kernels: Path | None, repo: Path, outer_environ: Mapping[str, str]
) -> None:
    """The root is first on ``sys.path``; our ``kernels`` neither hides the public package nor poses as it."""
    script = """
import sys
sys.path.insert(0, ".")
import transformers
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.utils import import_utils
print(import_utils.is_kernels_available())
try:
    import kernels
    print(getattr(kernels, "__file__", None))
except ImportError:
    print(None)
"""
    environ = {**outer_environ, "PYTHONPATH": str(public_kernels or "")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=repo,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    available, file = done.stdout.split("\n")[:2]
    if public_kernels is None:
        assert (available, file) == ("False", "None")
    else:
        assert (available, file) == ("True", str(public_kernels / "kernels" / "__init__.py"))
