"""Who may import whom: the floors of the house, read from the source with ``ast``.

A room may import its own files and rooms on lower floors; what it may import of others *when loaded* is a
short list. Heavy things (torch, transformers, huggingface_hub) are imported inside functions, so ``--help``
stays instant and a lossless conversion never pays for them. The effect is tested on processes below.
"""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import w4pack.convert
from w4pack.convert.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]

# From the foot of the house to its roof; rooms of one floor do not import each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("w4pack.convert.errors", "w4pack.kernels.layout", "w4pack"),
    ("w4pack.convert.events",),
    ("w4pack.convert.core",),
    ("w4pack.convert.files",),
    (
        "w4pack.convert.formats",
        "w4pack.convert.dialects",
        "w4pack.convert.engines",
        "w4pack.convert.rotate",
        "w4pack.convert.quantize",
    ),
    ("w4pack.convert.source", "w4pack.kernels"),
    ("w4pack.convert.planning",),
    ("w4pack.convert.jobs",),
    ("w4pack.convert.modeljobs",),  # jobs that compute with a model: torch
    ("w4pack.convert.hub",),
    ("w4pack.convert",),  # its own files: the Python API
    ("w4pack.kernels.hf", "w4pack.kernels.vllm"),  # artifacts in transformers and in vLLM
    ("w4pack.kernels.bench",),  # timing one's own shapes
    ("w4pack.cli",),
    ("w4pack.__main__",),
)

# Beside the standard library, at module level.
OUTSIDE: dict[str, set[str]] = {
    "w4pack.kernels.layout": {"numpy"},
    "w4pack.convert.core": {"numpy"},
    "w4pack.convert.files": {"numpy"},
    "w4pack.convert.formats": {"numpy"},
    "w4pack.convert.rotate": {"numpy", "torch"},
    "w4pack.convert.quantize": {"numpy", "torch"},
    "w4pack.convert.source": {"numpy"},
    "w4pack.convert.planning": {"numpy"},
    "w4pack.convert.jobs": {"numpy"},
    "w4pack.convert.modeljobs": {"numpy", "torch"},
    "w4pack.kernels": {"numpy", "torch"},
    "w4pack.kernels.hf": {"torch", "transformers"},
    "w4pack.kernels.vllm": {"torch", "vllm"},
    "w4pack.kernels.bench": {"torch"},
    "w4pack.cli": {"click"},
}


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement's module: who, whom, where, and whether it runs when the file is loaded."""

    importer: str
    imported: str
    line: int
    on_load: bool


def sources() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("convert/**/*.py"), *ROOT.glob("kernels/**/*.py")]
    named = {}
    for file in files:
        parts = ["w4pack", *file.relative_to(ROOT).with_suffix("").parts]
        if parts[1:] not in (["setup"],):
            named[".".join(parts).removesuffix(".__init__")] = file
    return named


SOURCES = sources()


def room_of(module: str) -> str:
    """The room with the longest name that holds ``module``."""
    rooms = [room for floor in FLOORS for room in floor]
    return max((r for r in rooms if module == r or module.startswith(r + ".")), key=len)


def floor_of(module: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if room_of(module) in floor)


def on_load(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the module is imported: not in functions, and not under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not typing_only:
            yield child
            yield from on_load(child)


def names_in(node: ast.stmt) -> Iterator[str]:
    """The modules that an import statement names; ``from package import module`` names the module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield full if full in SOURCES else base


def imports() -> Iterator[Import]:
    for module, file in SOURCES.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        loaded = {id(node) for node in on_load(tree)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name in names_in(node):
                    yield Import(module, name, node.lineno, id(node) in loaded)


IMPORTS = tuple(imports())
OURS = [i for i in IMPORTS if i.imported.partition(".")[0] == "w4pack"]


def told(found: list[Import]) -> list[str]:
    return [f"{i.importer}:{i.line} imports {i.imported}" for i in found]


def test_no_relative_imports() -> None:
    found = [
        f"{module}:{node.lineno}"
        for module, file in SOURCES.items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert found == []


def test_imports_only_go_down() -> None:
    def upward(i: Import) -> bool:
        if room_of(i.importer) == room_of(i.imported):
            return False
        return floor_of(i.imported) >= floor_of(i.importer)

    assert told([i for i in OURS if upward(i)]) == []


def test_formats_meet_only_in_the_canonical_linear() -> None:
    """A format imports no other format, and neither checkpoint files nor config dialects."""
    room = "w4pack.convert.formats"

    def strays(i: Import) -> bool:
        if i.importer == room or not i.importer.startswith(room + "."):
            return False
        sibling = i.imported.startswith(room + ".") and i.imported not in SHARED_BY_FORMATS
        return sibling or i.imported.startswith("w4pack.convert.files")

    assert told([i for i in OURS if strays(i)]) == []


SHARED_BY_FORMATS = {"w4pack.convert.formats.tiled", "w4pack.convert.formats.transposed"}


def test_planning_never_executes_and_nothing_imports_the_command_line() -> None:
    def wrong(i: Import) -> bool:
        plans = i.importer.startswith("w4pack.convert.planning") and ".jobs" in i.imported
        return plans or (i.imported == "w4pack.cli" and i.importer != "w4pack.__main__")

    assert told([i for i in OURS if wrong(i)]) == []


HEADERS_AND_RULES = (
    "w4pack.convert.errors",
    "w4pack.convert.core.scheme",
    "w4pack.convert.core.facts",  # what a warning says
    "w4pack.convert.files",
    "w4pack.convert.dialects",
    "w4pack.convert.engines",
)
# What runs between the linears is defined once: factors of transforms, codes of activations and cache.
ONLINE_RULES = ("w4pack.convert.rotate", "w4pack.convert.quantize.activations")


def test_kernels_and_converter_share_only_layout_headers_and_rules() -> None:
    def wrong(i: Import) -> bool:
        from_kernels = room_of(i.importer) == "w4pack.kernels" and i.imported.startswith("w4pack.convert")
        into_kernels = i.importer.startswith("w4pack.convert") and room_of(i.imported) == "w4pack.kernels"
        online = i.importer.startswith("w4pack.kernels.quarot.") and i.imported.startswith(ONLINE_RULES)
        return into_kernels or (from_kernels and not online and not i.imported.startswith(HEADERS_AND_RULES))

    assert told([i for i in OURS if wrong(i)]) == []


def test_what_is_loaded_of_others_is_on_the_list() -> None:
    def foreign(i: Import) -> bool:
        top = i.imported.partition(".")[0]
        if not i.on_load or top == "w4pack" or top in sys.stdlib_module_names:
            return False
        return top not in OUTSIDE.get(room_of(i.importer), set())

    assert told([i for i in IMPORTS if foreign(i)]) == []


def test_the_command_line_loads_nothing_of_ours_but_the_errors_and_exits() -> None:
    few = {"w4pack", "w4pack.convert.errors", "w4pack.convert.exits"}
    loaded = {i.imported for i in OURS if i.importer in few | {"w4pack.cli"} and i.on_load}
    assert loaded <= few


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    """A script run by path puts its folder first: a ``convert/inspect.py`` would break ``dataclasses``."""
    taken = {module for module in SOURCES if module.rpartition(".")[2] in sys.stdlib_module_names}
    assert taken == set()


def test_no_module_takes_the_name_of_a_job() -> None:
    """A submodule, once imported, is an attribute of its package: it would stand in the function's place."""
    assert [name for name in w4pack.convert.__all__ if f"w4pack.convert.{name}" in SOURCES] == []


def test_kernels_is_no_regular_package() -> None:
    """``kernels`` is also a public package that transformers uses; a folder without __init__ is not it."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


# ---- the effect, seen in processes ------------------------------------------------------------------------

HEAVY = ("torch", "transformers", "huggingface_hub", "scipy", "numpy", "safetensors", "tqdm")
LIST_MODULES = """
import sys
sys.argv = ["w4pack", *sys.argv[1:]]
code = 0
try:
    from w4pack.cli import main
    main()
except SystemExit as stop:
    code = stop.code
print("\\nMODULES", *(m for m in sys.modules if "." not in m))
sys.exit(code)
"""


def modules_after(*args: str | Path, codes: tuple[int, ...] = (0,)) -> set[str]:
    """Top-level modules that a command has imported when it ends."""
    return run_listing(*args, codes=codes)[0]


def run_listing(*args: str | Path, codes: tuple[int, ...] = (0,)) -> tuple[set[str], str]:
    """Run a command; return the modules it has imported when it ends, and what it said on stderr."""
    command = [sys.executable, "-c", LIST_MODULES, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in codes, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("MODULES"))
    return set(line.split()[1:]), done.stderr


@pytest.mark.parametrize(
    "args", [("--help",), ("convert", "--help"), ("push", "-h"), ("--version",)], ids=" ".join
)
def test_help_imports_click_and_nothing_heavy(args: tuple[str, ...]) -> None:
    loaded = modules_after(*args)
    assert "click" in loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_questions_never_import_torch(command: str, demo: Path) -> None:
    loaded = modules_after(command, demo, "--json", codes=(0, 3))  # check: this one is refused by engines
    assert loaded.isdisjoint({"torch", "transformers", "scipy"})


def test_a_lossless_conversion_never_imports_torch(demo: Path, tmp_path: Path) -> None:
    loaded = modules_after("convert", demo, tmp_path / "out", "-q")
    assert loaded.isdisjoint({"torch", "transformers", "scipy"})


@pytest.fixture(scope="module")
def packed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "out"
    w4pack.convert.convert(demo, out)
    return out


# What is wrong, what is asked, exit code, what the message says.
REFUSALS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no artifact": (("DEMO", "x"), 3, "not a w4pack artifact"),
    "no folder": (("DEMO/none", "x"), 1, "no such folder"),
    "options that exclude each other": (("OUT", "x", "--system", "y", "--no-chat"), 2, "leave out one"),
    "a number that is none": (("OUT", "x", "--temperature", "inf"), 2, "not a finite number"),
    "a device of no kind": (("OUT", "x", "--device", "abacus"), 2, "cpu, cuda or cuda:N"),
    "bits of activations": (("OUT", "x", "--act-bits", "4"), 2, "without `--act-bits` it runs with 16 bit"),
    "bits of the cache": (("OUT", "x", "--kv-bits", "8"), 2, "--quantize gptq --kv-bits 8"),
    "a system text without template": (("OUT", "x", "--system", "y"), 2, "leave out --system"),
    "no tokenizer": (("SILENT", "x"), 1, "copy the tokenizer's files"),
    "no prompt": (("OUT", "a\udcff"), 2, "a prompt is no text"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_generate_refuses_before_it_imports_torch(
    case: str, packed: Path, demo: Path, tmp_path: Path
) -> None:
    silent = tmp_path / "silent"
    shutil.copytree(packed, silent, ignore=shutil.ignore_patterns("tokenizer*"))
    folders = {"OUT": packed, "DEMO": demo, "SILENT": silent}
    args, code, text = REFUSALS[case]
    first, *rest = args[0].split("/")
    loaded, said = run_listing("generate", folders[first].joinpath(*rest), *args[1:], codes=(code,))
    assert text in said
    assert loaded.isdisjoint({"torch", "transformers"})


def test_a_gpu_without_driver_is_refused_from_its_library_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from w4pack.kernels.hf import before

    given = {"device": "cuda:1", "system": None, "chat": True, "top_p": 1, "seed": 0, "temperature": 0}
    monkeypatch.setattr(before, "DRIVER", "libnothing-of-this-name.so.1")
    with pytest.raises(UsageError) as caught:
        before.check_options(given)
    assert (caught.value.code, caught.value.hint) == ("no-device", "--device cpu")
    monkeypatch.setattr(before, "DRIVER", "libc.so.6")
    assert before.check_options(given) == ()
