"""What the commands on an output print: ``verify``, ``unpack``, ``push``. See ``command`` for ``convert``.

Data goes to stdout, everything else to stderr; with ``--json`` stdout holds JSON only.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from w4pack.convert import api
from w4pack.convert.console import Given, print_json, question_reporter, reporter_of, say, where_of
from w4pack.convert.errors import SourceError
from w4pack.convert.events import Human, Reporter
from w4pack.convert.jobs.execute import StopFlag
from w4pack.convert.jobs.running import MAX_KL, Running
from w4pack.convert.jobs.work import Packer

if TYPE_CHECKING:
    from w4pack.convert.hub.access import Access


def running_of(given: Given, stop: StopFlag, reporter: Reporter, packer: Packer | None = None) -> Running:
    """Return how a job is to run, from the command's options."""
    return Running(
        given["threads"],
        given["resume"],
        given["overwrite"],
        given["strict"],
        reporter,
        stop,
        given.get("device") or "cpu",
        packer,
        MAX_KL if given.get("max_kl") is None else given["max_kl"],
    )


def _lossy_text(value: Given) -> str:
    if value["lossless"] or not value["ok"]:
        return ""
    if value["against"] is None:
        return "; not lossless, as its conversion said"
    return "; not lossless: what was re-quantized or rounded has the error that was reported"


def run_verify(given: Given) -> bool:
    """Print whether an output is what it should be."""
    value = api.verify(
        given["out"],
        against=given["against"],
        where=where_of(given),
        threads=given["threads"],
        reporter=question_reporter(given),
    )
    if given["as_json"]:
        print_json(value)
    elif not given["quiet"]:
        for failure in value["failures"]:
            print(
                f"differs   {failure['tensor']}: {failure['kind']}: "
                f"expected {failure['expected']}, found {failure['found']}"
            )
        compared = f", {value['compared']} compared with {value['against']}" if value["against"] else ""
        print(
            f"{'ok' if value['ok'] else 'FAILED'}        {value['tensors']} tensors{compared}, "
            f"{len(value['failures'])} wrong{_lossy_text(value)}",
            flush=True,
        )
    return bool(value["ok"])


def run_unpack(given: Given, stop: StopFlag) -> None:
    """Turn an artifact back and say so."""
    reporter = reporter_of(given)
    try:
        count = api.unpack(
            given["path"], given["out"], where=where_of(given), running=running_of(given, stop, reporter)
        )
    finally:
        reporter.close()
    if given["as_json"]:
        reporter.event("done", out=given["out"], tensors=count, proved=count)
    elif not given["quiet"]:
        say(f"wrote {given['out']}: {count} tensors, all proved equal to the source's")


def run_push(given: Given, access: "Access | None" = None) -> None:
    """Upload an output and say where it is."""
    reporter = reporter_of(given)
    folder = Path(given["out"])
    if not folder.is_dir():
        raise SourceError("no such folder", code="no-such-folder", where=given["out"])
    report = api.push(
        folder,
        given["repo_id"],
        private=given["private"],
        access=access,
        reporter=reporter,
        bars=isinstance(reporter, Human),
    )
    if given["as_json"]:
        reporter.event("done", **report.to_json())
    elif not given["quiet"]:
        say(f"pushed {given['out']}: {report.summary()}")
