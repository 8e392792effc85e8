"""``w4pack eval``: perplexity of a checkpoint in any form that w4pack reads, and its divergence from another.

The weights are those of the file, whatever engine will run it; transformers' own layers do the arithmetic,
one in memory at a time. Imports nothing heavy when loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4pack.convert.console import Given, print_json, question_reporter, where_of
from w4pack.convert.events import SCHEMA, Quiet, Reporter, Told, warning_fields
from w4pack.convert.jobs.running import Running, check_device
from w4pack.convert.opening import Where, opened
from w4pack.convert.quantize.texts import Texts
from w4pack.convert.quantized import FIRST, require_extras, threads

if TYPE_CHECKING:
    import torch

    from w4pack.convert.modeljobs.scoring import Found
    from w4pack.convert.quantize.evaluation import Score

SEQLEN = 512  # tokens of a window, unless asked otherwise, and if the model has as many positions
OVERLAP = 0.01  # share of the calibration text that the measured text may hold before a warning


def run_eval(given: Given) -> None:
    """Measure, and print the figures."""
    reporter = question_reporter(given)
    try:
        value = evaluate(
            given["path"],
            given["text"],
            windows=given["windows"],
            seqlen=given["seqlen"],
            against=given["against"],
            device=given["device"] or "cpu",
            act_bits=given["act_bits"],
            kv_bits=given["kv_bits"],
            workers=given["threads"],
            where=where_of(given),
            reporter=reporter,
        )
    finally:
        reporter.close()
    if given["as_json"]:
        print_json(value)
    else:
        print("\n".join(_lines(value)), flush=True)


def evaluate(
    path: str | Path,
    text: str | Path,
    *,
    windows: int = 40,
    seqlen: int | None = None,
    against: str | Path | None = None,
    device: str = "cpu",
    act_bits: int | None = None,
    kv_bits: int | None = None,
    workers: int = 0,
    where: Where | None = None,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Return the object of ``eval --json``.

    The text is tokenized as a whole without special tokens and cut into consecutive windows of ``seqlen``
    tokens, None: 512, or the model's positions if they are fewer; each is run by itself and scores its tokens
    2 to ``seqlen``. ``against``: a model of the same tokenizer, usually the source; its perplexity and the
    divergence from its predictions are measured too. ``act_bits``, ``kv_bits``: of the runtime that an
    artifact's ``online`` records describe; None: as it was calibrated. What it does is done in transformers'
    layers, with quantized values in float32; a warning says what of it no kernel runs.

    Raises UsageError for a text without one whole window, for windows longer than the model has positions and
    for models of different vocabularies; SourceError for a model that cannot be read, VerifyError for one
    whose tensors were exchanged, Refused for one that transformers cannot build, W4PackError for one whose
    predictions are not finite.
    """
    check_device(device)
    Texts(str(text), FIRST).check()
    require_extras("measuring a model")
    from w4pack.convert.modeljobs import scoring
    from w4pack.convert.modeljobs.prepared import device_of
    from w4pack.convert.quantize.calibration import positions_of, too_long
    from w4pack.convert.source.online import without_kernels

    place, told, target = where or Where(), Told(reporter or Quiet()), device_of(device)
    with threads(Running(threads=workers).workers), opened(path, place, told) as (checkpoint, _):
        source = scoring.read_model(checkpoint, told)
        length = seqlen or min(SEQLEN, positions_of(source.config) or SEQLEN)
        cut = scoring.windows_of(source, str(text), windows, length)
        for warning in (*too_long(cut, source.config), *without_kernels(source, act_bits, kv_bits)):
            told.event("warning", **warning_fields(warning))
        between = scoring.runtime(source, act_bits, kv_bits)
        own = scoring.through(source, cut, target, between)
        if against is None:
            found = scoring.alone(own, path)
        else:
            with opened(against, place, told) as (other, _):
                reference = scoring.read_model(other, told)
                for warning in without_kernels(reference, None, None):
                    told.event("warning", **warning_fields(warning))
                found = scoring.beside(own, path, reference, against, cut, target)
        shared = scoring.overlap_of(checkpoint, cut)
    value = {"schema": SCHEMA, "path": str(path), **_text(Texts(str(text)).name, cut), **_figures(found[0])}
    value |= {"act_bits": between.act_bits, "kv_bits": between.kv_bits, "calibration_overlap": shared}
    value |= {"against": None if against is None else str(against), **_lost(found)}
    if shared > OVERLAP:
        told.event("warning", **_overlap(value["text"], shared))
    return value | {"warnings": told.warnings}


def _text(name: str, cut: "torch.Tensor") -> dict[str, Any]:
    """Return what is said of the tokens."""
    return {"text": name, "windows": int(cut.shape[0]), "seqlen": int(cut.shape[1]), "digest": _digest(cut)}


def _figures(score: "Score") -> dict[str, Any]:
    """Return what is said of a model by itself."""
    return {"scored": score.scored, "perplexity": score.perplexity, "window_nats": score.nll}


def _lost(found: "Found") -> dict[str, Any]:
    """Return what is said of a model beside another one."""
    from w4pack.convert.quantize.evaluation import interval

    own, theirs, apart = found
    if theirs is None or apart is None:
        return {}
    mean, half = interval([a - b for a, b in zip(own.nll, theirs.nll, strict=True)])
    nats = {"nats": mean, "nats_interval": half if half < 1e300 else None}
    return {"perplexity_against": theirs.perplexity, **nats, **apart.summary()}


def _overlap(text: str, share: float) -> dict[str, str]:
    """Return the warning that a model knows a text from its calibration."""
    return {
        "code": "calibration-overlap",
        "where": text,
        "expected": f"at most {OVERLAP:.0%} of the calibration text",
        "found": f"{share:.0%}",
        "text": f"{share:.0%} of the text that this model was calibrated with occurs in the measured text: "
        "the figures are better than on other text",
    }


def _digest(cut: "torch.Tensor") -> str:
    from hashlib import sha256

    return sha256(cut.reshape(-1).numpy().astype("<i4").tobytes()).hexdigest()


def _lines(value: Mapping[str, Any]) -> list[str]:
    lines = [
        f"text        {value['text']}: {value['windows']} windows of {value['seqlen']} tokens, "
        f"digest {value['digest'][:16]}",
        f"perplexity  {value['perplexity']:.3f}",
    ]
    if value["against"] is not None:
        half = value["nats_interval"]
        spread = "" if half is None else f" +- {half:.4f} (95 %)"
        lines += [
            f"against     {value['against']}: {value['perplexity_against']:.3f}",
            f"lost        {value['nats']:.4f} nats a token{spread}",
            f"divergence  mean {value['kl_mean']:.3g}, 99.9th percentile {value['kl_p999']:.3g} nats",
            f"agreement   {value['top1_agreement']:.2%} of the likeliest tokens",
        ]
    return lines
