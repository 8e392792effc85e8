"""What stops ``w4pack generate`` before it starts: found in names, configs and headers.

torch and transformers take seconds to import, so nothing here does: what cannot be is said at once.
"""

import ctypes
import sys
from contextlib import closing, suppress
from pathlib import Path

from w4pack.convert.console import Given, where_of
from w4pack.convert.errors import HubError, SourceError, UsageError
from w4pack.convert.events import Reporter
from w4pack.convert.files.jsonfile import read_object
from w4pack.convert.files.local import LocalStore
from w4pack.convert.files.sidefiles import TOKENIZERS, has_tokenizer
from w4pack.convert.hub.resolve import HubSource, parse_source, snapshot
from w4pack.convert.jobs.running import check_device
from w4pack.kernels.artifact import open_artifact, read_config
from w4pack.kernels.hf import online

TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
DRIVER = "libcuda.so.1"


LEAST_TEMPERATURE = 1e-5  # scores divided by less leave the range of float32


def check_options(given: Given) -> tuple[dict[str, str], ...]:
    """Look at the options alone. Returns a warning for each that has no effect.

    Raises:
        UsageError: options that exclude each other, or a device that is not there.
    """
    if given["system"] is not None and not given["chat"]:
        raise UsageError(
            "a system text needs the chat template",
            where="--system",
            found="--no-chat",
            hint="leave out one of the two",
        )
    if 0 < given["temperature"] < LEAST_TEMPERATURE:
        raise UsageError(
            "the temperature is too low to draw by",
            where="--temperature",
            expected=f"0, or at least {LEAST_TEMPERATURE}",
            found=str(given["temperature"]),
            hint="0 takes the most likely token",
        )
    if given["device"] is not None:
        check_device(given["device"])
        _check_driver(given["device"])
    drawn = {"--top-p": given["top_p"] < 1, "--seed": given["seed"] != 0}
    idle = [option for option, asked in drawn.items() if asked and given["temperature"] == 0]
    return tuple(_idle(option) for option in idle)


def _idle(option: str) -> dict[str, str]:
    return {
        "code": "no-effect",
        "where": option,
        "expected": "--temperature above 0",
        "found": "0; the option changed nothing",
        "text": f"{option} has no effect without --temperature: nothing is drawn",
    }


def folder_of(given: Given, tell: Reporter) -> Path:
    """Return the folder of the artifact, a repository of the Hub downloaded first if it is one.

    Raises:
        UsageError, SourceError, HubError: as `inspect` would.
        Refused: no artifact.
    """
    where = where_of(given)
    found = parse_source(given["path"], where.revision)
    if not isinstance(found, HubSource):
        return found.path
    tell.event("note", text=found.notice)
    if not where.local_files_only:
        _glimpse(found)
    return snapshot(found, cache_dir=where.cache_dir, local_files_only=where.local_files_only)


def _glimpse(source: HubSource) -> None:
    """Look at the config before gigabytes are fetched. A Hub that does not answer is the download's matter:
    the cache may hold everything.
    """
    from w4pack.convert.hub.remote import HubStore

    with suppress(HubError), closing(HubStore(source)) as store:
        read_config(store, online=True)


def check(folder: Path, given: Given) -> None:
    """Refuse what cannot run.

    Raises:
        UsageError: bits that the artifact does not have, a system text without a chat template.
        Refused: no artifact, or one with records that no kernel runs.
        SourceError: files that are broken, or no tokenizer.
    """
    artifact = open_artifact(folder, online=True)
    online.plan(artifact, given["act_bits"], given["kv_bits"], of_command=True)
    if not has_tokenizer(folder):
        raise no_tokenizer(folder, None)
    if given["system"] is not None and not _has_template(folder):
        raise no_template(folder)


def _check_driver(device: str) -> None:
    if device != "cpu" and sys.platform == "linux" and not _loads(DRIVER):
        raise UsageError(
            "no such device",
            code="no-device",
            where="--device",
            expected="cpu, or cuda where there is a GPU",
            found=f"{device}, without a driver of NVIDIA ({DRIVER})",
            hint="--device cpu",
        )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _has_template(folder: Path) -> bool:
    if any(file for pattern in TEMPLATES for file in folder.glob(pattern)):
        return True
    with LocalStore(folder) as store:
        name = "tokenizer_config.json"
        return name in store.files() and bool(read_object(store, name)[1].get("chat_template"))


def no_template(folder: Path) -> UsageError:
    """Return the error of a system text that nothing tells the model."""
    return UsageError("the tokenizer has no chat template", where=str(folder), hint="leave out --system")


def no_tokenizer(folder: Path, found: str | None) -> SourceError:
    """Return the error of a folder without a tokenizer; ``found``: what transformers said."""
    return SourceError(
        "no tokenizer that transformers can load",
        code="no-tokenizer",
        where=str(folder),
        expected=", ".join(TOKENIZERS),
        found=None if found is None else found.strip().partition("\n")[0][:200],
        hint="copy the tokenizer's files from the source of the artifact",
    )
