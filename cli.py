"""The command line: parse, call one function of ``w4pack.convert``, print. Nothing else.

Only click, the errors and how a command ends are imported here, so that ``--help`` is instant; each command
imports what it needs.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import click

from w4pack.convert.errors import (
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_SIGINT,
    EXIT_SIGTERM,
    EXIT_USAGE,
    EXIT_VERIFY,
    NobodyReads,
    StdoutError,
    W4PackError,
)
from w4pack.convert.exits import (
    Terminated,
    interrupted,
    leave,
    of_options,
    signal_behind,
    stop_flag,
    tell_json,
    terminate,
    told,
)

if TYPE_CHECKING:
    from w4pack.convert.jobs.work import Packer

    Numbers = click.ParamType[tuple[int, ...]]
    Number = click.ParamType[int]
else:
    Number = Numbers = click.ParamType  # generic in new releases of click only


class FloatRange(click.FloatRange):
    """A number within bounds; NaN and infinity are within none, although comparisons may say so."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raises click.BadParameter."""
        found: float = super().convert(value, param, ctx)
        if not abs(found) < float("inf"):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


F = TypeVar("F", bound=Callable[..., Any])
TARGETS = ("marlin", "marlin-legacy", "gptq", "awq", "compressed-tensors", "dense")
ENGINES = ("vllm", "sglang", "transformers", "w4pack")
RUN_BITS = click.Choice(["4", "8", "16"])  # of activations and of the cache at run time

EXIT_CODES = """\b
Exit codes:
  0  done, or yes
  1  failed
  2  wrong options or arguments
  3  refused, or no
  4  verification failed
  130 / 143  stopped by a signal"""


def _version(context: click.Context, wanted: bool) -> None:
    """Print the versions of w4pack, Python, and torch if it is there, without importing it."""
    if not wanted or context.resilient_parsing:
        return
    from importlib import metadata

    from w4pack import __version__

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    click.echo(f"w4pack {__version__}\nPython {sys.version.split()[0]}\ntorch {torch}")
    context.exit()


def _options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    def apply(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def _number(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    return None if value is None else int(value)


hub_options = _options(
    click.option("--revision", help="Branch, tag or commit of a Hub source."),
    click.option("--cache-dir", help="Folder for downloads, in place of the Hub client's own cache."),
    click.option("--local-files-only", is_flag=True, help="Use what is in the cache; ask no server."),
)


def _output_options(quiet: str) -> Callable[[F], F]:
    return _options(
        click.option(
            "--json", "as_json", is_flag=True, help="Print JSON: one object for a question, lines for a job."
        ),
        click.option("-q", "--quiet", is_flag=True, help=quiet),
        click.option("-v", "--verbose", is_flag=True, help="Print more: every warning, every layer."),
        click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error."),
    )


output_options = _output_options("Print nothing but errors.")
answer_options = _output_options("Print nothing but the answer and errors.")  # without it there is no use
running_options = _options(
    click.option(
        "--threads", type=click.IntRange(0, 64), default=0, help="Worker threads; 0: one per core, at most 8."
    ),
    click.option("--resume", is_flag=True, help="Go on with an interrupted run of the same job."),
    click.option("--overwrite", is_flag=True, help="Replace OUT, once the new one is complete."),
    click.option(
        "--strict", is_flag=True, help="Record sha256 of the whole source; a resumed run checks it."
    ),
)
quantize_options = _options(
    click.option(
        "--quantize",
        type=click.Choice(["gptq", "rtn"]),
        help="Quantize a 16-bit model. gptq: with calibration text; rtn: round to nearest, without.",
    ),
    click.option(
        "--gptaq/--no-gptaq",
        default=None,
        help="With gptq: also make up for what the layers before have lost. On by default; twice the time.",
    ),
    click.option("--bits", type=click.Choice(["4", "8"]), callback=_number, help="Of a code; 4 by default."),
    click.option(
        "--group-size",
        type=click.Choice(["-1", "32", "64", "128"]),
        callback=_number,
        help="Inputs that share a scale; -1: all; 128 by default.",
    ),
    click.option("--sym/--asym", default=None, help="Without or with zero points; --sym by default."),
    click.option(
        "--module-bits",
        multiple=True,
        metavar="PATTERN=BITS",
        help="Other bits (4, 8, 16) for some linears: a full name, or re: and an expression. Repeatable.",
    ),
    click.option("--bpw", type=float, help="Bits per weight to meet: a scheme is chosen for each linear."),
    click.option(
        "--calibration",
        type=click.Path(),
        help="Text file, JSONL with a `text` a line, or hub:ORG/NAME[:SPLIT[:COLUMN]]; else a sample.",
    ),
    click.option("--samples", type=click.IntRange(1), help="Windows of text; 128 by default."),
    click.option("--seqlen", type=click.IntRange(2), help="Tokens of a window; 2048 by default."),
    click.option(
        "--damp", type=float, help="Damping, a share of the Hessian's mean diagonal; 0.03 by default."
    ),
    click.option(
        "--max-kl",
        type=FloatRange(0),
        help="Divergence from the source, nats a token, above which nothing is published; 4 by default. "
        "A resumed run may have another one.",
    ),
    click.option(
        "--act-bits",
        type=RUN_BITS,
        callback=_number,
        help="Of activations at run time, which calibration then runs with; 16 (as they are) by default.",
    ),
    click.option(
        "--kv-bits",
        type=RUN_BITS,
        callback=_number,
        help="Of keys and values in the cache, likewise; 16 by default.",
    ),
    click.option(
        "--device",
        help="Where codes are chosen and Marlin tiles packed: cpu (default), cuda or cuda:1.",
    ),
)
thorough_option = click.option("--thorough", is_flag=True, help="Read every deciding tensor, not a sample.")


class Size(Number):
    """A number of bytes: ``5GB``, ``500MB``, ``4GiB``, ``1000000``."""

    name = "size"
    UNITS: ClassVar[dict[str, int]] = {
        "": 1,
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
        "TIB": 2**40,
    }

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Turn text into bytes."""
        if isinstance(value, int):
            return value
        text = str(value).strip().upper()
        digits = text.rstrip("KMGTIB ")
        try:
            return int(float(digits) * self.UNITS[text[len(digits) :].strip()])
        except (KeyError, ValueError, OverflowError):
            self.fail(f"{value!r} is no size; write 5GB or 4GiB", param, ctx)


class IntList(Numbers):
    """Numbers separated by commas."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Turn text into numbers."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers; write 1,2,4,8", param, ctx)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=EXIT_CODES
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=lambda c, p, v: _version(c, v),
    help="Show the versions and exit.",
)
def root() -> None:
    """Pack 4-bit checkpoints for the tensor cores once, or rewrite them for stock engines, with proof.

    \b
    w4pack inspect ORG/NAME                          what is it? (no download)
    w4pack check ORG/NAME --engine vllm --tp 1,2,4   will the engine take it?
    w4pack convert SRC OUT --to marlin               pack it; then: w4pack verify OUT --against SRC
    """


@root.command(short_help="Convert a checkpoint, with a plan first.")
@click.argument("src")
@click.argument("out", type=click.Path())
@click.option(
    "--to", type=click.Choice(TARGETS), default="marlin", show_default=True, help="What OUT becomes."
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="dtype of the weights, for --to dense.",
)
@click.option("--max-shard-size", type=Size(), default="5GB", show_default=True, help="Largest weight file.")
@click.option(
    "--regroup",
    is_flag=True,
    help="Re-quantize layers whose act-order the target cannot carry. "
    "Lossy; the error is measured and reported.",
)
@click.option(
    "--widen", is_flag=True, help="Write asymmetric 4-bit layers as symmetric 8 bit. Exact; twice the size."
)
@click.option(
    "--pad-for-tp",
    type=click.IntRange(1, 1024),
    help="Pad the MLP's intermediate size so that this tensor parallelism fits. Exact.",
)
@click.option(
    "--fold-act-order",
    is_flag=True,
    help="Fold a down projection's act-order into gate and up, also where the target could keep it.",
)
@click.option("--round-scales", is_flag=True, help="Round fp32 scales that no 16-bit dtype holds. Lossy.")
@click.option(
    "--zero-reading",
    type=click.Choice(["word", "nibble"]),
    help="How ambiguous GPTQ v1 zero points are read.",
)
@click.option(
    "--source-format", type=click.Choice(["gptq", "gptq_v2"]), help="GPTQ version, where no label says it."
)
@click.option(
    "--ignore-key",
    multiple=True,
    help="Convert although this config key changes the forward pass. Repeatable.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Leave these linears in 16 bit: a module's full name, or re: and a regular expression. Repeatable.",
)
@click.option(
    "--rotate",
    type=click.Choice(["none", "offline", "full"]),
    default="none",
    show_default=True,
    help="Rotate a 16-bit model by Hadamard matrices, which spreads outliers. offline: exact, in the weights "
    "alone; full: with transforms that a runtime applies.",
)
@click.option(
    "--tp",
    type=click.IntRange(1, 1024),
    help="Tensor parallelism that the online transforms of --rotate full must not cross.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of the signs of rotations, and of the part of the text that calibrates.",
)
@quantize_options
@click.option("--dry-run", is_flag=True, help="Stop after the plan.")
@click.option(
    "--verify", "verify_after", is_flag=True, help="Read OUT back and compare it with SRC at the end."
)
@click.option("--push-to", help="Upload OUT to this Hub repository, once it is complete.")
@click.option("--private", is_flag=True, help="Create the Hub repository as a private one.")
@running_options
@hub_options
@output_options
def convert(**given: Any) -> None:
    """Convert SRC (a folder or ORG/NAME) to OUT.

    \b
    w4pack convert ./llama-gptq ./llama-marlin
    w4pack convert ORG/NAME ./out --to compressed-tensors --dry-run
    w4pack convert ./llama-fp16 ./out --quantize gptq --calibration text.txt --to gptq
    """
    with _errors(given):
        from w4pack.convert.command import run_convert

        run_convert(given, stop_flag(), _packer_on)


@root.command(short_help="Say what a checkpoint is.")
@click.argument("path")
@thorough_option
@hub_options
@output_options
def inspect(**given: Any) -> None:
    """Say what PATH (a folder or ORG/NAME) is: format, scheme of every layer, sizes, order, max TP.

    \b
    w4pack inspect ORG/NAME
    w4pack inspect ./out --json | jq .layers[0]
    """
    with _errors(given):
        from w4pack.convert.answers import run_inspect

        run_inspect(given)


@root.command(short_help="Say what engines do with a checkpoint.")
@click.argument("path")
@click.option(
    "--engine",
    multiple=True,
    type=click.Choice(ENGINES),
    help="Engine to ask about; all by default. Repeatable.",
)
@click.option(
    "--tp",
    multiple=True,
    type=IntList(),
    default=("1",),
    show_default="1",
    help="Tensor parallelisms, e.g. 1,2,4,8. Repeatable.",
)
@thorough_option
@hub_options
@output_options
def check(**given: Any) -> None:
    """Say whether an engine takes PATH, refuses it, computes something else, or is slow; exit code 3 means
    no.

    \b
    w4pack check ORG/NAME --engine vllm --tp 1,2,4,8
    """
    with _errors(given):
        from w4pack.convert.answers import run_check

        sys.exit(EXIT_OK if run_check(given) else EXIT_REFUSED)


@root.command(short_help="Prove an output, and compare it with its source.")
@click.argument("out", type=click.Path())
@click.option(
    "--against", help="The source: a folder or ORG/NAME. Codes, zeros, scales and order are compared."
)
@click.option(
    "--threads", type=click.IntRange(0, 64), default=0, help="Worker threads; 0: one per core, at most 8."
)
@hub_options
@output_options
def verify(**given: Any) -> None:
    """Prove OUT: every tensor there, every hash right, every number finite; equal to its source.

    \b
    w4pack verify ./out --against ./source
    """
    with _errors(given):
        from w4pack.convert.outputs import run_verify

        sys.exit(EXIT_OK if run_verify(given) else EXIT_VERIFY)


@root.command(short_help="Turn an artifact back into its source.")
@click.argument("path")
@click.argument("out", type=click.Path())
@running_options
@hub_options
@output_options
def unpack(**given: Any) -> None:
    """Turn the artifact PATH back into its source in OUT: tensors, names, config, side files; proved.

    \b
    w4pack unpack ./llama-marlin ./llama-gptq-again
    """
    with _errors(given):
        from w4pack.convert.outputs import run_unpack

        run_unpack(given, stop_flag())


@root.command(short_help="Upload an output to the Hub.")
@click.argument("out", type=click.Path())
@click.argument("repo_id", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Create the Hub repository as a private one.")
@output_options
def push(**given: Any) -> None:
    """Upload OUT to the Hub repository ORG/NAME, config.json last. Runs again where it stopped.

    \b
    w4pack push ./llama-marlin ORG/llama-marlin
    """
    with _errors(given):
        from w4pack.convert.outputs import run_push

        run_push(given)


@root.command("eval", short_help="Measure what a checkpoint has lost.")
@click.argument("path")
@click.option(
    "--text", required=True, type=click.Path(), help="Text file to measure on, or JSONL with a `text` a line."
)
@click.option(
    "--windows", type=click.IntRange(1), default=40, show_default=True, help="Most windows of the text."
)
@click.option(
    "--seqlen",
    type=click.IntRange(2),
    help="Tokens of a window; 512 by default, or the model's positions if they are fewer.",
)
@click.option(
    "--against", metavar="SRC", help="The source, a folder or ORG/NAME: its figures, and the divergence."
)
@click.option("--device", help="Where to compute: cpu (default), cuda or cuda:1.")
@click.option(
    "--act-bits",
    type=RUN_BITS,
    callback=_number,
    help="Of activations, where the artifact's records allow it; as it was calibrated by default.",
)
@click.option(
    "--kv-bits",
    type=RUN_BITS,
    callback=_number,
    help="Of keys and values in the cache, likewise.",
)
@click.option(
    "--threads", type=click.IntRange(0, 64), default=0, help="Worker threads; 0: one per core, at most 8."
)
@hub_options
@answer_options
def evaluate(**given: Any) -> None:
    """Measure the perplexity of PATH (a folder or ORG/NAME, in any form that w4pack reads), and with
    --against how far its predictions are from those of its source.

    \b
    w4pack eval ./out --text book.txt --against ./llama-fp16
    """
    with _errors(given):
        from w4pack.convert.measure import run_eval

        run_eval(given)


@root.command(short_help="Answer prompts with an artifact.")
@click.argument("path")
@click.argument("prompts", metavar="PROMPT...", nargs=-1, required=True)
@click.option(
    "--device", help="cpu, cuda or cuda:1; without it a GPU if the kernels run on it, else the CPU."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Most tokens of an answer.",
)
@click.option(
    "--temperature",
    type=FloatRange(0),
    default=0.0,
    show_default=True,
    help="Above 0: draw tokens, the more freely the higher; 0: always take the likeliest, after what "
    "generation_config.json asks for (repetition_penalty and the like).",
)
@click.option(
    "--top-p",
    type=FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Draw only from the likeliest tokens that make up this probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of the drawing of tokens.",
)
@click.option("--system", metavar="TEXT", help="What the model is told before the prompt.")
@click.option(
    "--no-chat", "chat", flag_value=False, default=True, help="Send the prompt as it is, in no chat template."
)
@click.option(
    "--act-bits",
    type=RUN_BITS,
    callback=_number,
    help="Of activations, of an artifact that was made for it: as it was calibrated unless asked otherwise.",
)
@click.option(
    "--kv-bits",
    type=RUN_BITS,
    callback=_number,
    help="Of keys and values in the cache, likewise.",
)
@hub_options
@answer_options
def generate(**given: Any) -> None:
    """Load the artifact PATH (a folder or ORG/NAME) and continue or answer each PROMPT; `-` reads it from
    stdin.

    \b
    w4pack generate ./llama-marlin "Why is the sky blue?"
    """
    with _errors(given):
        from w4pack.kernels.hf.generate import run_generate

        run_generate(given)


@root.command(short_help="Time the kernels on this machine's card.")
@click.argument("path", required=False)
@click.option(
    "--shape",
    multiple=True,
    metavar="NxK",
    help="Outputs x inputs of a layer, in place of an artifact's. Repeatable.",
)
@click.option(
    "--m",
    type=IntList(),
    default="1,4,16,64,256,1024,4096",
    show_default=True,
    help="Rows of activations: tokens in flight.",
)
@click.option("--bits", type=click.Choice(["4", "8"]), help="Width of a code, with --shape: 4 by default.")
@click.option(
    "--group-size",
    type=click.Choice(["-1", "32", "64", "128"]),
    help="Inputs that share a scale, with --shape: 128 by default; -1: all.",
)
@click.option(
    "--act-bits",
    type=RUN_BITS,
    callback=_number,
    help="Of activations: 4 and 8 time the quantizer and the product of integers. Of an artifact as it was "
    "calibrated, of shapes 16 by default.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="dtype of activations, float16 or bfloat16; without it the model's, or float16.",
)
@answer_options
def bench(**given: Any) -> None:
    """Time every distinct layer of the artifact PATH, fused as it is loaded, or a SHAPE: share of the floor,
    time, speed-up over the 16-bit product of torch in the same run. A wrong result is an error.

    \b
    w4pack bench ./llama-marlin
    w4pack bench --shape 28672x4096 --shape 4096x14336 --m 1,16,64
    """
    with _errors(given):
        from w4pack.kernels.bench.command import run_bench

        run_bench(given)


def _packer_on(device: str) -> "Packer | None":
    """Hand the kernels to the converter, which imports nothing of them."""
    from w4pack.kernels.packing import packer_on

    return packer_on(device)


@contextlib.contextmanager
def _errors(given: dict[str, Any]) -> Iterator[None]:
    """Print errors in the form asked for, and leave with their exit code."""
    try:
        yield
        sys.stdout.flush()
    except W4PackError as err:
        leave(of_options(err, given), as_json=bool(given.get("as_json")))
    except KeyboardInterrupt:
        leave(interrupted(EXIT_SIGINT), as_json=bool(given.get("as_json")))
    except Terminated:
        leave(interrupted(EXIT_SIGTERM), as_json=bool(given.get("as_json")))
    except SystemExit:  # the answer is no
        sys.stdout.flush()
        raise
    except (click.ClickException, click.exceptions.Exit, NobodyReads):
        raise
    except Exception as err:
        signalled = signal_behind(err)
        if signalled:
            leave(interrupted(signalled), as_json=bool(given.get("as_json")))
        if given.get("debug"):
            raise
        leave(told(err), as_json=bool(given.get("as_json")))


def main() -> None:
    """Run the command. ``w4pack.__main__`` is the entry point: it answers signals until this does."""
    from w4pack.convert.streams import guarded

    with guarded():
        try:
            signal.signal(signal.SIGTERM, terminate)
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            code = root.main(prog_name="w4pack", standalone_mode=False)
            sys.exit(code if isinstance(code, int) else EXIT_OK)
        except (click.Abort, KeyboardInterrupt):
            leave(interrupted(EXIT_SIGINT), as_json=False)
        except Terminated:
            leave(interrupted(EXIT_SIGTERM), as_json=False)
        except click.ClickException as err:
            _usage(err)
        except RuntimeError as err:  # while a command's module is imported
            if not signal_behind(err):
                raise
            leave(interrupted(signal_behind(err)), as_json=False)
        except StdoutError as err:
            leave(err, as_json=False)
        except NobodyReads:
            sys.exit(EXIT_OK)


def _usage(err: click.ClickException) -> NoReturn:
    """Print a usage error, as JSON where ``--json`` was given."""
    if "--json" in sys.argv:
        fields = {
            "schema": 1,
            "event": "error",
            "code": "usage",
            "exit": EXIT_USAGE,
            "what": err.format_message(),
            "where": None,
            "expected": None,
            "found": None,
            "hint": None,
        }
        tell_json(fields, f"error: {err.format_message()}")
    elif isinstance(err, click.UsageError) and err.ctx is not None and err.format_message():
        print(f"error: {err.format_message()}\n\nhint: {err.ctx.command_path} --help", file=sys.stderr)
    else:
        err.show()
    sys.exit(EXIT_USAGE)
