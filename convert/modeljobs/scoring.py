"""Scores checkpoints in any form that w4pack reads, on tokens of a text: see ``w4pack.convert.measure``."""

import math
from functools import partial
from pathlib import Path

import torch

from w4pack.convert.errors import Refused, UsageError, W4PackError
from w4pack.convert.events import Reporter, warning_fields
from w4pack.convert.files import samples
from w4pack.convert.files.checkpoint import Checkpoint
from w4pack.convert.files.described import of_tensors
from w4pack.convert.files.exchanged import refuse_exchanged
from w4pack.convert.files.provider import torch_dtype
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.modeljobs.online import NOTHING, Runtime, runtime_of
from w4pack.convert.modeljobs.prepared import tokenizer_of
from w4pack.convert.modeljobs.weights import Numbers
from w4pack.convert.quantize import calibration, evaluation
from w4pack.convert.quantize.evaluation import Difference, Score, compare
from w4pack.convert.quantize.stream import Stream
from w4pack.convert.source import written
from w4pack.convert.source.detect import Source, read_source
from w4pack.convert.source.online import misplaced, unlike_written
from w4pack.convert.source.reading import DetectOptions

BATCH_TOKENS = 4096  # in one run of a layer

Found = tuple[Score, Score | None, Difference | None]  # of the model, of the other one, between them


def read_model(checkpoint: Checkpoint, tell: Reporter) -> Source:
    """Understand a model. Raises what loaders raise for an artifact that was changed since it was written,
    and warns where they warn.

    Refused for online records that do not fit, VerifyError for records and headers that were changed and for
    tensors that were exchanged, SourceError for records that are lost and for a manifest that is damaged.
    """
    source = read_source(checkpoint, DetectOptions())
    problems = () if source.problems else tuple(unlike_written(source)) or misplaced(source)
    problems = problems or (() if source.problems else written.problems_of(source))
    if problems:
        raise Refused.together(problems)
    taken = of_tensors(checkpoint.manifest() or {}, "sample")
    infos = [info for name, info in checkpoint.tensors.items() if name in taken]
    changed = refuse_exchanged(infos, taken, partial(_sample, checkpoint), checkpoint.label)
    for warning in (*written.warnings_of(source), *changed):
        tell.event("warning", **warning_fields(warning))
    return source


def _sample(checkpoint: Checkpoint, info: TensorInfo) -> str:
    """Return a tensor's sample as it lies in the file."""

    def read(offset: int, length: int) -> bytes:
        held = bytearray(length)
        checkpoint.read_into(info, offset, memoryview(held))
        return bytes(held)

    return samples.digest(read, 0, info.nbytes)


def windows_of(source: Source, text: str, windows: int, seqlen: int) -> torch.Tensor:
    """Return the tokens (W, L) to measure with. Raises UsageError for a text without one window."""
    tokens, _ = calibration.first_tokens(text, tokenizer_of(source), windows * seqlen)
    return _cut(tokens, windows, seqlen, text)


def _cut(tokens: torch.Tensor, windows: int, seqlen: int, where: str) -> torch.Tensor:
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


def runtime(source: Source, act_bits: int | None, kv_bits: int | None) -> Runtime:
    """Return what runs between the linears. Raises UsageError for bits that the model was not made for."""
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


def through(source: Source, cut: torch.Tensor, device: torch.device, between: Runtime) -> Stream:
    """Send windows (W, L) through all layers of a model. Raises UsageError for windows that it cannot embed.

    between  what runs between the linears
    """
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


def _own_dtype(source: Source) -> torch.dtype:
    """Return the dtype of the model's embeddings: that of its arithmetic on a GPU."""
    wide = [t for t in source.dense if len(t.shape) == 2 and t.dtype in ("F16", "BF16", "F32")]
    return torch_dtype(wide[0].dtype if wide else "F16")


def alone(own: Stream, path: str | Path) -> Found:
    """Score a model by itself. Raises W4PackError for predictions that are no numbers."""
    found = compare(own, None)
    _refuse_not_finite(path, found[0])
    return found


def beside(
    own: Stream,
    path: str | Path,
    reference: Source,
    against: str | Path,
    cut: torch.Tensor,
    device: torch.device,
) -> Found:
    """Score a model and another one, and how far apart they are. Raises as ``evaluate`` does."""
    theirs = through(reference, cut, device, runtime(reference, None, None))
    _refuse_other_vocabulary(own, theirs, against)
    found = compare(own, theirs)
    _refuse_not_finite(path, found[0])
    _refuse_not_finite(against, found[1])
    return found


def _refuse_not_finite(path: str | Path, score: Score | None) -> None:
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


def _refuse_other_vocabulary(own: Stream, theirs: Stream, against: str | Path) -> None:
    """Raise UsageError for models whose predictions cannot be compared."""
    sizes = [stream.logits(0, 0, 1).shape[-1] for stream in (own, theirs)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            "the two models have different vocabularies",
            where="--against",
            expected=f"{sizes[0]:,} tokens",
            found=f"{sizes[1]:,} at {against}",
        )


def overlap_of(checkpoint: Checkpoint, cut: torch.Tensor) -> float:
    """Return the share of the model's calibration text that occurs in the measured one."""
    record = (checkpoint.manifest() or {}).get("quantization", {}).get("calibration")
    return calibration.overlap(record, cut.reshape(-1).numpy()) if record else 0.0
