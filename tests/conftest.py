"""What every test stands on: profiles, isolation, the fixtures folder, processes, the report of groups."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"

# The environment before isolation, for tests that build or install packages (pip's configuration and cache).
OUTER_ENVIRON: Mapping[str, str] = dict(os.environ)

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
HUB_FOLDERS = (
    "HF_HUB_CACHE",
    "HF_ASSETS_CACHE",
    "HF_XET_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_CACHE",
)
NOWHERE = "http://127.0.0.1:9"  # the discard port: whoever forgets the local server fails at once


# ---- hypothesis -------------------------------------------------------------------------------------------

_calm: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # shared machines
settings.register_profile("dev", max_examples=50, **_calm)
settings.register_profile("ci", max_examples=200, derandomize=True, **_calm)
settings.register_profile("nightly", max_examples=5000, print_blob=True, **_calm)
settings.load_profile(os.environ.get("W4PACK_PROFILE", "ci" if os.environ.get("CI") else "dev"))


# ---- isolation --------------------------------------------------------------------------------------------


def _isolated(home: Path) -> dict[str, str]:
    return {
        "HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_ENDPOINT": NOWHERE,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_DATA_HOME": str(home / "data"),
    }


# huggingface_hub reads its variables once, at import, which may be during collection: so they are set here
# for the whole session, and again for each test with a home of its own.
os.environ.update(_isolated(Path(tempfile.gettempdir()) / f"w4pack-tests-home-{os.getuid()}"))
for _name in (*TOKENS, *HUB_FOLDERS):
    os.environ.pop(_name, None)


@pytest.fixture(autouse=True)
def _isolation(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No home, no caches, no tokens, no network but loopback."""
    for name, value in _isolated(tmp_path_factory.getbasetemp() / "home").items():
        monkeypatch.setenv(name, value)
    for name in (*TOKENS, *HUB_FOLDERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket.socket, "connect", _connect_to_loopback)


_connect = socket.socket.connect


def _connect_to_loopback(self: socket.socket, address: Any) -> None:
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in (
        "127.0.0.1",
        "::1",
        "localhost",
    ):
        raise OSError(f"tests do not reach the network: {address!r}")
    _connect(self, address)


# ---- paths ------------------------------------------------------------------------------------------------


def _shared_folder() -> Path:
    return Path(OUTER_ENVIRON.get("W4PACK_SHARED") or ROOT.parent / "shared")


NO_SHARED = "needs the fixtures folder (W4PACK_SHARED or ../shared)"
NO_GPU = "needs a CUDA device"
# How the reason of a skip begins. Anything else, "could not import torch" for one, would hide tests in CI.
EXPLAINED = (
    "needs ",
    "cannot become ",
    "this transformers has no ",
    "the engine has no kernel ",
    "root ",
    "no CUDA device",
    "one CUDA device",
    "the compiler nvidia-cuda-nvrtc",
)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder that holds ``fixtures/``; skips where there is none."""
    folder = _shared_folder()
    if not (folder / "fixtures").is_dir():
        pytest.skip(NO_SHARED)
    return folder


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def demo() -> Path:
    """The act-order GPTQ checkpoint that ships in ``examples/``."""
    return ROOT / "examples" / "demo-gptq"


@pytest.fixture(scope="session")
def outer_environ() -> Mapping[str, str]:
    """The environment before isolation, for children that install packages."""
    return OUTER_ENVIRON


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for torch: tiny products are slower on many, and sums come out the same everywhere."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- processes --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """What a process left: exit code and both streams, whole."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """The one JSON object on stdout."""
        return json.loads(self.stdout)

    def events(self) -> list[dict[str, Any]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.stdout.splitlines()]


Runner = Callable[..., Run]


def clean_environ(home: Path, **more: str) -> dict[str, str]:
    """Return an environment with a path, a plain locale and nothing of the user's."""
    kept = {
        name: OUTER_ENVIRON[name] for name in ("PATH", "LD_LIBRARY_PATH", "TMPDIR") if name in OUTER_ENVIRON
    }
    return {**kept, "LANG": "C.UTF-8", "COLUMNS": "100", **_isolated(home), **more}


@pytest.fixture
def w4pack(tmp_path: Path) -> Runner:
    """Run ``python -m w4pack ARGS`` as a process of its own, in an empty folder unless ``cwd`` is given."""

    def run(
        *args: str | os.PathLike[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout: float = 120,
    ) -> Run:
        work = cwd or tmp_path / "cwd"
        work.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "w4pack", *map(os.fspath, args)],
            cwd=work,
            env=clean_environ(tmp_path / "home", **(env or {})),
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Run(done.returncode, done.stdout, done.stderr)

    return run


# ---- markers and the report of groups ---------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for ``shared`` is marked so; marked tests skip, saying why, where it is missing."""
    lacking = {} if (_shared_folder() / "fixtures").is_dir() else {"shared": NO_SHARED}
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        lacking["gpu"] = NO_GPU
    for item in items:
        if "shared" in getattr(item, "fixturenames", ()):
            item.add_marker("shared")
        for name, reason in lacking.items():
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def group_of(nodeid: str) -> str:
    """``tests/cli/test_help.py::x`` is of group ``cli``; a file right below ``tests`` is its own group."""
    parts = nodeid.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else parts[-1].removeprefix("test_").removesuffix(".py")


def _counts(stats: Mapping[str, list[Any]]) -> Iterator[tuple[str, Counter[str]]]:
    groups: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        for report in stats.get(outcome, ()):
            groups.setdefault(group_of(report.nodeid), Counter())[outcome] += 1
    yield from sorted(groups.items())


def pytest_report_header() -> list[str]:
    """Which optional parts of the suite can run here."""
    folder = _shared_folder()
    there = "found" if (folder / "fixtures").is_dir() else "absent"
    return [f"w4pack: hypothesis profile {settings.get_current_profile_name()}, shared fixtures {there}"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per group (folder of ``tests/``): what ran, with counts."""
    terminalreporter.section("test groups")
    for group, counts in _counts(cast("Mapping[str, list[Any]]", terminalreporter.stats)):
        said = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
        terminalreporter.write_line(f"{group:<14} {said}")
    for line in _unexplained_skips(terminalreporter.config):
        terminalreporter.write_line(f"skipped for a reason that is not on the list: {line}")


def _unexplained_skips(config: pytest.Config) -> list[str]:
    """Skips whose reason is not one of the known kinds: they would hide tests silently."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", ()) if reporter is not None else ()
    reasons = [(r.nodeid, str(r.longrepr[2]).removeprefix("Skipped: ")) for r in skipped]
    return [f"{nodeid}: {reason}" for nodeid, reason in reasons if not reason.startswith(EXPLAINED)]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """In CI a skip for a reason that nobody foresaw fails the run."""
    if exitstatus == pytest.ExitCode.OK and os.environ.get("CI") and _unexplained_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
