"""``python -m w4pack``, and the console script: a signal ends the command also while it is imported."""

# Not ``signal``, which takes a third of the time in which nothing answers.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys

ERROR = "stopped by a signal"
# The error event of ``--json``. Text, as nothing can be imported while something else is.
EVENT = (
    '{{"schema": 1, "event": "error", "code": "interrupted", "exit": {code}, "what": "' + ERROR + '", '
    '"where": null, "expected": null, "found": null, "hint": null}}\n'
)


def main() -> None:
    """Entry point of the ``w4pack`` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    from w4pack.cli import main as run

    run()


def _leave(signum: int, frame: object) -> None:
    """End the process: nothing has been begun, and an exception could be caught by what is imported."""
    code = 128 + signum
    told = (1, EVENT.format(code=code)) if "--json" in sys.argv else (2, f"error: {ERROR}\n")
    try:
        os.write(told[0], told[1].encode())
    finally:  # also where nobody reads
        os._exit(code)


if __name__ == "__main__":
    main()
