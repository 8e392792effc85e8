"""``w4pack eval``: perplexity of a checkpoint in any form that w4pack reads, and its divergence from another.

The weights are those of the file, whatever engine will run it; transformers' own layers do the arithmetic,
one in memory at a time. Imports nothing heavy when loaded.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4pack.convert.console import Given, print_json, question_reporter, where_of
from w4pack.convert.core.facts import Warning_
from w4pack.convert.errors import Refused, UsageError, W4PackError
from w4pack.convert.events import SCHEMA, Reporter, warning_fields
from w4pack.convert.files import samples
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.exchanged import refuse_exchanged
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.jobs import manifest
from w4pack.convert.jobs.running import Running, check_device
from w4pack.convert.opening import Where, opened
from w4pack.convert.quantize.texts import Texts
from w4pack.convert.quantized import FIRST, require_extras, threads
from w4pack.convert.source.detect import Source, read_source
from w4pack.convert.source.online import lost, records_of
from w4pack.convert.source.reading import DetectOptions

if TYPE_CHECKING:
    import torch

    from w4pack.convert.modeljobs.online import Runtime
    from w4pack.convert.quantize.evaluation import Difference, Score
    from w4pack.convert.quantize.stream import Stream

    Found = tuple[Score, Score | None, Difference | None]  # of the model, of the other one, between them

SEQLEN = 512  # tokens of a window, unless asked otherwise
BATCH_TOKENS = 4096  # in one run of a layer
OVERLAP = 0.01  # share of the calibration text that the measured text may hold before a warning


def run_eval(given: Given) -> None:
    """Measure, and print the figures."""
    reporter = question_reporter(given)
    try:
        value = evaluate(
            given["path"],
            given["text"],
            windows=given["windows"],
            seqlen=given["seqlen"] or SEQLEN,
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
    seqlen: int = SEQLEN,
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
    tokens; each is run by itself and scores its tokens 2 to ``seqlen``. ``against``: a model of the same
    tokenizer, usually the source; its perplexity and the divergence from its predictions are measured too.
    ``act_bits``, ``kv_bits``: of the runtime that an artifact's ``online`` records describe; None: as it was
    calibrated. What it does is done in transformers' layers, with quantized values in float32.

    Raises UsageError for a text without one whole window, for windows longer than the model has positions and
    for models of different vocabularies; SourceError for a model that cannot be read, Refused for one that
    transformers cannot build, W4PackError for one whose predictions are not finite.
    """
    check_device(device)
    Texts(str(text), FIRST).check()
    require_extras("measuring a model")
    from w4pack.convert.events import Quiet
    from w4pack.convert.modeljobs.prepared import device_of

    place, told, target = where or Where(), reporter or Quiet(), device_of(device)
    with threads(Running(threads=workers).workers), opened(path, place, told) as (checkpoint, _):
        source = _read(checkpoint)
        cut = _windows(source, str(text), windows, seqlen)
        for warning in _too_long(cut, source.config):
            told.event("warning", **warning_fields(warning))
        between = _runtime(source, act_bits, kv_bits)
        own = _through(source, cut, target, between)
        if against is None:
            found = _alone(own, path)
        else:
            with opened(against, place, told) as (other, _):
                found = _beside(own, path, _read(other), against, cut, target)
        shared = _overlap(checkpoint.store.read, checkpoint.store.files(), cut)
    value = {"schema": SCHEMA, "path": str(path), **_text(Texts(str(text)).name, cut), **_figures(found[0])}
    value |= {"act_bits": between.act_bits, "kv_bits": between.kv_bits, "calibration_overlap": shared}
    value |= {"against": None if against is None else str(against), **_lost(found)}
    if shared > OVERLAP:
        told.event("warning", code="calibration-overlap", where=value["text"], text=_overlap_text(shared))
    return value


def _read(checkpoint: Checkpoint) -> Source:
    """Understand a model. Raises what loaders raise for an artifact that was changed since it was written.

    VerifyError for tensors that were exchanged, SourceError for online records that are lost.
    """
    source = read_source(checkpoint, DetectOptions())
    if not source.problems and not records_of(source):
        lost_of_it = list(lost(source))
        if lost_of_it:
            raise Refused.together(lost_of_it)
    value = manifest.of_store(checkpoint.store.read, checkpoint.store.files()) or {}
    told = {name: entry.get("sample") for name, entry in value.get("tensors", {}).items()}
    written = {name: sample for name, sample in told.items() if isinstance(sample, str)}
    infos = [info for name, info in checkpoint.tensors.items() if name in written]
    refuse_exchanged(infos, written, partial(_sample, checkpoint), checkpoint.label)
    return source


def _sample(checkpoint: Checkpoint, info: TensorInfo) -> str:
    """Return a tensor's sample as it lies in the file."""

    def read(offset: int, length: int) -> bytes:
        held = bytearray(length)
        checkpoint.read_into(info, offset, memoryview(held))
        return bytes(held)

    return samples.digest(read, 0, info.nbytes)


def _too_long(cut: "torch.Tensor", config: Mapping[str, Any]) -> Iterator[Warning_]:
    from w4pack.convert.quantize.calibration import too_long

    return too_long(cut, config)


def _windows(source: Source, text: str, windows: int, seqlen: int) -> "torch.Tensor":
    """Return the tokens (W, L) to measure with. Raises UsageError for a text without one window."""
    from w4pack.convert.modeljobs.prepared import tokenizer_of
    from w4pack.convert.quantize.calibration import first_tokens

    tokens, _ = first_tokens(text, tokenizer_of(source), windows * seqlen)
    return _cut(tokens, windows, seqlen, text)


def _alone(own: "Stream", path: str | Path) -> "Found":
    """Score a model by itself. Raises W4PackError for predictions that are no numbers."""
    from w4pack.convert.quantize.evaluation import compare

    found = compare(own, None)
    _refuse_not_finite(path, found[0])
    return found


def _beside(
    own: "Stream",
    path: str | Path,
    reference: Source,
    against: str | Path,
    cut: "torch.Tensor",
    device: "torch.device",
) -> "Found":
    """Score a model and another one, and how far apart they are. Raises as ``evaluate`` does."""
    from w4pack.convert.quantize.evaluation import compare

    theirs = _through(reference, cut, device, _runtime(reference, None, None))
    _refuse_other_vocabulary(own, theirs, against)
    found = compare(own, theirs)
    _refuse_not_finite(path, found[0])
    _refuse_not_finite(against, found[1])
    return found


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


def _overlap_text(share: float) -> str:
    return (
        f"{share:.0%} of the text that this model was calibrated with occurs in the measured text: "
        "the figures are better than on other text"
    )


def _refuse_not_finite(path: str | Path, score: "Score | None") -> None:
    """Raise W4PackError for a model that does not predict: no figure is made of what is no number."""
    bad = [number for number, nats in enumerate(score.nll if score else (), 1) if not math.isfinite(nats)]
    if score is not None and bad:
        raise W4PackError(
            "the predictions of a model are not finite, so nothing can be measured",
            code="predictions",
            where=str(path),
            expected="finite logits",
            found=f"NaN or infinity in {len(bad)} of {len(score.nll)} windows, the first in window {bad[0]}",
            hint=f"`w4pack verify {path}` names values that are not finite",
        )


def _refuse_other_vocabulary(own: "Stream", theirs: "Stream", against: str | Path) -> None:
    """Raise UsageError for models whose predictions cannot be compared."""
    sizes = [stream.logits(0, 0, 1).shape[-1] for stream in (own, theirs)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            "the two models have different vocabularies",
            where="--against",
            expected=f"{sizes[0]:,} tokens",
            found=f"{sizes[1]:,} at {against}",
        )


def _cut(tokens: "torch.Tensor", windows: int, seqlen: int, where: str) -> "torch.Tensor":
    count = min(windows, tokens.numel() // seqlen)
    if count == 0:
        raise UsageError(
            "the text has no whole window",
            where=where,
            expected=f"at least {seqlen} tokens",
            found=f"{tokens.numel()} tokens",
            hint="`--seqlen` makes windows shorter",
        )
    return tokens[: count * seqlen].view(count, seqlen)


def _runtime(source: Source, act_bits: int | None, kv_bits: int | None) -> "Runtime":
    """Return what runs between the linears. Raises UsageError for bits that the model was not made for."""
    from w4pack.convert.modeljobs.online import NOTHING, runtime_of
    from w4pack.convert.modeljobs.weights import Numbers

    own = source.claims is not None and source.claims.method == "w4pack"
    records = (source.quant_config or {}).get("online") if own else None
    if not records:
        NOTHING.online.settings(act_bits, kv_bits)
        return NOTHING
    numbers = Numbers(source, online=True)
    infos = {name: numbers.info(name) for name in numbers.names()}
    packed = [layer.name for layer in source.layers]
    return runtime_of(
        source.config, infos, records, packed, act_bits=act_bits, kv_bits=kv_bits, read=numbers.get
    )


def _through(source: Source, cut: "torch.Tensor", device: "torch.device", between: "Runtime") -> "Stream":
    import torch

    from w4pack.convert.modeljobs.weights import Numbers
    from w4pack.convert.quantize import calibration, evaluation

    numbers = Numbers(source, online=True)
    calibration.check_windows(cut, source.config, {name: numbers.info(name) for name in numbers.names()})
    dtype = torch.float32 if device.type == "cpu" else _own_dtype(source)
    return evaluation.through(
        source.config,
        numbers,
        cut,
        device,
        dtype,
        per_batch=max(1, BATCH_TOKENS // cut.shape[1]),
        between=between,
    )


def _own_dtype(source: Source) -> "torch.dtype":
    """Return the dtype of the model's embeddings: that of its arithmetic on a GPU."""
    from w4pack.convert.files.provider import torch_dtype

    wide = [t for t in source.dense if len(t.shape) == 2 and t.dtype in ("F16", "BF16", "F32")]
    return torch_dtype(wide[0].dtype if wide else "F16")


def _overlap(read: Any, files: Mapping[str, int], cut: "torch.Tensor") -> float:
    """Return the share of the model's calibration text that occurs in the measured one."""
    from w4pack.convert.quantize.calibration import overlap

    value = manifest.of_store(read, files)
    record = ((value or {}).get("quantization") or {}).get("calibration")
    return overlap(record, cut.reshape(-1).numpy()) if isinstance(record, dict) else 0.0


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
