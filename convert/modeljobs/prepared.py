"""What is quantized: a 16-bit source, rotated or not, its calibration tokens, the device."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from w4pack.convert.core.facts import Warning_
from w4pack.convert.core.families import natural_key
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.dialects.online import ACT_SITES
from w4pack.convert.errors import SourceError, UsageError
from w4pack.convert.files import counts
from w4pack.convert.files.provider import CheckpointProvider, Provider
from w4pack.convert.files.readahead import ReadAhead
from w4pack.convert.files.sidefiles import TOKENIZERS, has_tokenizer
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.jobs.complete import finished_plan, of_command, refuse_other_files
from w4pack.convert.jobs.identity import folder_of, source_files
from w4pack.convert.jobs.places import decided_before
from w4pack.convert.jobs.running import Running, check_device
from w4pack.convert.jobs.samejob import identity
from w4pack.convert.jobs.staging import Staging
from w4pack.convert.modeljobs.complete import refuse_incomplete
from w4pack.convert.modeljobs.decided import chosen_before
from w4pack.convert.modeljobs.mixed import Chosen, choose, recorded
from w4pack.convert.modeljobs.overlap import overlaps
from w4pack.convert.planning.online import CLIPS_LATER, guides, model_of, records, runs_online
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan, SourceFile
from w4pack.convert.planning.quantizing import (
    ModelTensors,
    default_schemes,
    fixed_schemes,
    linears_of,
    plan_quantization,
)
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.planning.unquantized import as_recorded, asked_of, unquantized
from w4pack.convert.quantize.calibration import Calibration, calibrate, check_windows, too_long
from w4pack.convert.quantize.clips import ACT_DEFAULTS, KV_DEFAULTS
from w4pack.convert.rotate.plan import RotationPlan
from w4pack.convert.rotate.rotated import Rotated
from w4pack.convert.source.detect import Source


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Everything that a quantization starts from.

    provider     tensors of the model, rotated where that is asked for
    model        their names and headers
    options      as recorded: of the calibration file only the name
    calibration  None for methods that need none
    chosen       linear -> its scheme and why, where schemes were chosen by measurement
    ahead        what the provider reads through where a layer is read while another is in work
    rotation     what is done to the source's weights first, or None
    files        what identifies the source
    guides       headers of the guides of keys, which are measured with the clip ratios; none: nothing is
    """

    source: Source
    provider: Provider
    model: ModelTensors
    options: ConvertOptions
    origin: Mapping[str, str] | None
    device: torch.device
    calibration: Calibration | None
    warnings: tuple[Warning_, ...] = ()
    chosen: Mapping[str, Chosen] | None = None
    ahead: ReadAhead | None = None
    rotation: RotationPlan | None = None
    guides: Mapping[str, TensorInfo] = field(default_factory=dict)
    files: tuple[SourceFile, ...] = ()

    def reading(self) -> AbstractContextManager[object]:
        """Return a block behind which no thread reads any more."""
        return nullcontext() if self.ahead is None else closing(self.ahead)

    @property
    def schemes(self) -> Mapping[str, QuantScheme] | None:
        """Linear -> scheme, where they were chosen by measurement."""
        return None if self.chosen is None else {name: one.scheme for name, one in self.chosen.items()}

    @property
    def windows(self) -> torch.Tensor:
        """Calibration tokens (W, L)."""
        if self.calibration is None:
            raise ValueError("this method has no calibration")
        return self.calibration.windows

    def record(self) -> dict[str, Any]:
        """Return what decides bytes beside the options."""
        found: dict[str, Any] = {"device": self.device.type}
        if self.calibration is not None:
            found["calibration"] = self.calibration.record()
        if self.guides:
            found["clips"] = CLIPS_LATER
        return found


def prepare(
    source: Source,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
    texts: tuple[list[str], str] | None = None,
    out: Path | None = None,
) -> Prepared:
    """Look at a source that is to be quantized, and read its calibration text, unless that is given.

    out  where an interrupted run is resumed: it may have chosen schemes

    Raises Refused for a source that is quantized already; UsageError for a text that gives nothing, windows
    that the model has no positions for, or a device that is not there; SourceError for a source without a
    tokenizer, or with another model's.
    """
    asked = asked_of(options)
    device = device_of(running.device)
    found = unquantized(source, options)
    provider, ahead = _provider(source, found.rotation, device)
    refuse_incomplete(found.model, provider, asked.method)
    calibration = None if asked.method == "rtn" else _calibration(source, options, found.model, texts)
    model = found.model
    added: Mapping[str, TensorInfo] = {}
    if runs_online(options):
        model, added = _online(model, options, found.rotation, guided=calibration is not None)
    prepared = Prepared(
        source,
        provider,
        model,
        as_recorded(options, None if texts is None else texts[1]),
        origin,
        device,
        calibration,
        (*found.warnings, *_of_text(calibration, model)),
        ahead=ahead,
        rotation=found.rotation,
        guides=added,
        files=source_files(source.checkpoint, strict=running.strict),
    )
    if asked.bpw is None:
        return prepared
    return replace(prepared, chosen=_chosen(prepared, options, asked.bpw, out, running))


def _provider(
    source: Source, rotation: RotationPlan | None, device: torch.device
) -> tuple[Provider, ReadAhead | None]:
    """Return what gives the tensors, rotated where that is asked for, and what it reads through."""
    provider: Provider = CheckpointProvider(source.checkpoint, device)
    ahead = None
    if overlaps(device):
        provider = ahead = ReadAhead(provider)
    if rotation is not None:
        provider = Rotated(provider, rotation, device)
    return provider, ahead


def _calibration(
    source: Source, options: ConvertOptions, model: ModelTensors, texts: tuple[list[str], str] | None
) -> Calibration:
    """Read the calibration text, unless it is given, and check it against the model."""
    asked = asked_of(options)
    calibration = calibrate(
        asked.calibration,
        tokenizer_of(source, "`--quantize rtn` needs no text"),
        samples=asked.samples,
        seqlen=asked.seqlen,
        seed=options.seed,
        given=texts,
    )
    check_windows(calibration.windows, model.config, model.infos)
    return calibration


def _chosen(
    prepared: Prepared, options: ConvertOptions, bpw: float, out: Path | None, running: Running
) -> dict[str, Chosen]:
    """Choose a scheme for each linear that no rule gives bits to, unless the run that is resumed has.

    Measuring takes a while: an OUT that a resumed run cannot replace is refused before.
    """
    free, fixed = default_schemes(prepared.model, options), fixed_schemes(prepared.model, options)
    if out is not None:
        own = prepared.options
        job = identity(own.to, own.chosen(), prepared.files, prepared.record())
        found = chosen_before(decided_before(out, job, running), free)
        if found is None and running.resume:
            found = _chosen_and_done(prepared, free, out, running)
            if found is None:
                Staging(out).check_standing(overwrite=running.overwrite, resume=True)
        if found is not None:
            running.reporter.event("note", text="--bpw: as the earlier run chose")
            return found
    return choose(free, prepared.provider, TARGETS[options.to], bpw, prepared.device, fixed)


def _chosen_and_done(
    prepared: Prepared, free: Mapping[str, QuantScheme], out: Path, running: Running
) -> dict[str, Chosen] | None:
    """Return the schemes of an OUT that is complete: the plan that is made with them is the one of its own.

    Raises Refused where it is of the same command, but of another source.
    """
    own = prepared.options
    value = of_command(out, own.to, own.chosen(), prepared.origin)
    found = None if value is None else recorded(value, free)
    if found is not None and finished_plan(out, plan_of(replace(prepared, chosen=found))[0]) is not None:
        return found
    if value is not None and not running.overwrite:
        refuse_other_files(value, prepared.files)
    return None


def plan_of(prepared: Prepared) -> tuple[Plan, tuple[Warning_, ...]]:
    """Plan a quantization, wherever it goes; with what there is to say of the plan alone."""
    return plan_quantization(
        prepared.model,
        prepared.options,
        origin=prepared.origin,
        files=prepared.files,
        record=prepared.record(),
        schemes=prepared.schemes,
    )


def _online(
    model: ModelTensors, options: ConvertOptions, rotation: RotationPlan | None, *, guided: bool
) -> tuple[ModelTensors, dict[str, TensorInfo]]:
    """Return a model whose runtime does more than multiply with its records, and the headers of its guides.

    Ratios are those that are taken without a text. ``guided``: each layer has a guide of its keys.
    """
    accounted = model_of({**model.config, **model.config_changes}, model.infos)
    acts = dict.fromkeys(ACT_SITES, ACT_DEFAULTS)
    online = records(options, accounted, rotation, acts, KV_DEFAULTS, KV_DEFAULTS, guided=guided)
    added = guides(accounted) if guided else {}
    infos = {**model.infos, **added}
    infos = {name: infos[name] for name in sorted(infos, key=natural_key)}
    return replace(model, online=online, infos=infos), added


def device_of(name: str) -> torch.device:
    """Return the device of a name. Raises UsageError for one that is not there."""
    check_device(name)
    try:
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError, ValueError) as err:
        raise UsageError(
            "no such device",
            code="no-device",
            where="--device",
            expected="cpu, or cuda where torch finds a GPU",
            found=f"{name}: {str(err).partition(chr(10))[0][:100]}",
            hint="--device cpu",
        ) from err
    return device


def tokenizer_of(source: Source, hint: str | None = None) -> Any:
    """Load the source's own tokenizer. Raises SourceError, with a hint, where there is none."""
    from transformers import AutoTokenizer

    counts.check_layers(source.config, source.checkpoint.tensors)  # the config is made too, for its class
    folder = folder_of(source.checkpoint)
    if folder is None or not has_tokenizer(folder):
        raise SourceError(
            "no tokenizer, so no text can be read",
            code="no-tokenizer",
            where=source.checkpoint.label,
            expected=", ".join(TOKENIZERS),
            hint=hint,
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as err:  # of files that are not as they should be, transformers raises every kind
        raise SourceError(
            "the tokenizer cannot be loaded",
            code="no-tokenizer",
            where=str(folder),
            expected="a tokenizer, and a config.json, that transformers reads",
            found=str(err).partition("\n")[0][:200],
            hint="fetch the tokenizer's files again, or install what its reader needs",
        ) from err


def _of_text(calibration: Calibration | None, model: ModelTensors) -> tuple[Warning_, ...]:
    """Warn of windows longer than the model is made for, and of too little text.

    That is fewer windows than asked for, or fewer tokens than inputs of the widest linear.
    """
    if calibration is None:
        return ()
    widest = max((info.shape[1] for info in linears_of(model.infos).values()), default=0)
    found = list(too_long(calibration.windows, model.config))
    if calibration.windows.shape[0] < calibration.wanted:
        found.append(
            Warning_(
                "calibration-short",
                calibration.source,
                f"{calibration.wanted} windows of text",
                f"{calibration.windows.shape[0]} of {calibration.windows.shape[1]} tokens",
                f"a longer text has more; `--samples {calibration.windows.shape[0]}` asks for what there is",
            )
        )
    if calibration.tokens < widest:
        found.append(
            Warning_(
                "calibration-few",
                calibration.source,
                f"at least {widest} tokens, the inputs of the widest linear",
                f"{calibration.tokens} tokens",
                "take a longer text, or more of it: `--samples`, `--seqlen`",
            )
        )
    return tuple(found)
