"""The part of packaging that pyproject.toml cannot say: the checkout's root *is* the package ``w4pack``.

See docs/decisions/0001-packaging.md. Everything else stands in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
ROOT_MODULES = ("__init__", "__main__", "cli")  # any other .py at the root is a stray, not part of w4pack
FOLDERS = ("convert", "kernels")


def packages() -> list[str]:
    """Return the root and every folder below ``convert`` and ``kernels`` (which has no __init__ file)."""
    found = ["w4pack"]
    for top in FOLDERS:
        below = find_namespace_packages(str(ROOT / top), exclude=["*__pycache__*"])
        found += [f"w4pack.{top}", *(f"w4pack.{top}.{name}" for name in below)]
    return found


class BuildPy(build_py):
    """Keep strays of the root out of the wheel; in editable mode lay down a folder named ``w4pack``."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, module, file) of what is packed."""
        modules = super().find_package_modules(package, package_dir)
        return [m for m in modules if package != "w4pack" or m[1] in ROOT_MODULES]

    def run(self) -> None:
        """Build, and in editable mode lay the links."""
        # Whatever lies in build/lib is packed: of an earlier build also modules that were deleted since.
        if not self.editable_mode:
            remove(Path(self.build_lib, "w4pack"))
        super().run()
        if self.editable_mode:
            link_dev_tree(ROOT)


class BdistWheel(bdist_wheel):
    """Cubins tie a wheel to Linux on x86_64, not to a version of Python or torch."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of the file name."""
        has_cubins = any((ROOT / "kernels" / "cubins").rglob("*.cubin"))
        return ("py3", "none", "manylinux_2_17_x86_64" if has_cubins else "any")

    def finalize_options(self) -> None:
        """Settle the options; a folder that the caller named is left alone by ``run``."""
        named = self.bdist_dir is not None
        super().finalize_options()
        self.own_folder = None if named else Path(self.bdist_dir)

    def run(self) -> None:
        """Pack, in a folder without what a build that was interrupted has left there."""
        if self.own_folder is not None:
            remove(self.own_folder)
        super().run()


def remove(folder: Path) -> None:
    """Remove a folder if it is there. Raises OSError if it stays."""
    if folder.exists():
        shutil.rmtree(folder)


def link_dev_tree(root: Path) -> None:
    """Make ``build/dev/w4pack`` of relative links: type checkers do not follow the editable finder."""
    tree = root / "build" / "dev" / "w4pack"
    tree.mkdir(parents=True, exist_ok=True)
    for name in (*(f"{module}.py" for module in ROOT_MODULES), "py.typed", *FOLDERS):
        link = tree / name
        if not link.is_symlink():
            link.symlink_to(Path("..", "..", "..", name))


setup(
    package_dir={"w4pack": "."},
    packages=packages(),
    package_data={
        "w4pack": ["py.typed"],
        "w4pack.convert": ["**/*.json", "quantize/data/*.txt"],
        "w4pack.kernels": ["csrc/*.cu", "csrc/*.cuh", "cubins/**/*", "tiles_*.json", "quarot/*.json"],
    },
    include_package_data=False,
    cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel},
)
