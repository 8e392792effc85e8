"""What is quantized: a 16-bit source, rotated or not, its calibration tokens, the device."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from w4pack.convert.core.facts import Warning_
from w4pack.convert.core.families import natural_key
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.dialects.online import ACT_SITES
from w4pack.convert.errors import SourceError, UsageError, name_some
from w4pack.convert.files.provider import Added, CheckpointProvider, Provider
from w4pack.convert.files.readahead import ReadAhead
from w4pack.convert.files.sidefiles import TOKENIZERS, has_tokenizer
from w4pack.convert.jobs.conversion import Running, check_device, folder_of
from w4pack.convert.modeljobs.clipping import find_clips
from w4pack.convert.modeljobs.complete import refuse_incomplete
from w4pack.convert.modeljobs.mixed import Chosen, choose
from w4pack.convert.modeljobs.online import runtime_of
from w4pack.convert.modeljobs.overlap import overlaps
from w4pack.convert.planning.online import CLIPS_LATER, guides, model_of, records, runs_online
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.quantizing import ModelTensors, default_schemes, fixed_schemes, linears_of
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.planning.unquantized import as_recorded, unquantized
from w4pack.convert.quantize.calibration import Calibration, calibrate, check_windows
from w4pack.convert.quantize.clips import ACT_DEFAULTS, KV_DEFAULTS, Clips
from w4pack.convert.quantize.team import Team
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
    clips_later  clip ratios are not measured yet: the records have those that are taken without a text
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
    clips_later: bool = False

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
        if self.clips_later:
            found["clips"] = CLIPS_LATER
        return found


def prepare(
    source: Source,
    options: ConvertOptions,
    origin: Mapping[str, str] | None,
    running: Running,
    texts: tuple[list[str], str] | None = None,
    *,
    measuring: bool = True,
    team: Team | None = None,
) -> Prepared:
    """Look at a source that is to be quantized, and read its calibration text, unless that is given.

    measuring  whether clip ratios are found by running the model; a plan alone has the same records with
               ratios that nobody has measured
    team       the processes that share the text: the leader runs the model for them

    Raises Refused for a source that is quantized already; UsageError for a text that gives nothing, windows
    that the model has no positions for, or a device that is not there; SourceError for a source without a
    tokenizer, or with another model's.
    """
    asked = options.quantize
    if asked is None:
        raise ValueError("nothing is to be quantized")
    device = device_of(running.device)
    found = unquantized(source, options)
    provider, ahead = _provider(source, found.rotation, device)
    refuse_incomplete(found.model, provider, asked.method)
    calibration = None if asked.method == "rtn" else _calibration(source, options, found.model, texts)
    blind: list[str] = []
    model, later = found.model, calibration is not None and runs_online(options) and not measuring
    if runs_online(options):
        running_model = _Online(model, options, found.rotation, provider, device, team)
        model, provider, blind = running_model.planned(calibration, measuring=measuring)
    return Prepared(
        source,
        provider,
        model,
        as_recorded(options) if texts is None else as_recorded(options, texts[1]),
        origin,
        device,
        calibration,
        (*found.warnings, *_too_little(calibration, model), *_unguided(blind)),
        None if asked.bpw is None else _chosen(model, options, provider, asked.bpw, device),
        ahead,
        later,
    )


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
    asked = options.quantize
    if asked is None:
        raise ValueError("nothing is to be quantized")
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
    model: ModelTensors, options: ConvertOptions, provider: Provider, bpw: float, device: torch.device
) -> dict[str, Chosen]:
    """Choose a scheme for each linear that no rule gives bits to."""
    free, fixed = default_schemes(model, options), fixed_schemes(model, options)
    return choose(free, provider, TARGETS[options.to], bpw, device, fixed)


@dataclass(frozen=True, slots=True, eq=False)
class _Online:
    """A model whose runtime does more than multiply, on its way to ``online`` records."""

    model: ModelTensors
    options: ConvertOptions
    rotation: RotationPlan | None
    provider: Provider
    device: torch.device
    team: Team | None = None

    def planned(
        self, calibration: Calibration | None, *, measuring: bool
    ) -> tuple[ModelTensors, Provider, list[str]]:
        """Return the model with its records, who gives its tensors, and the guides that are 0.

        With calibration text each layer has a guide of its keys, too; they and the ratios are measured if
        asked for.
        """
        model, provider = self.model, self.provider
        config = {**model.config, **model.config_changes}
        accounted = model_of(config, model.infos)
        clips = Clips(dict.fromkeys(ACT_SITES, ACT_DEFAULTS), KV_DEFAULTS, KV_DEFAULTS)
        added = {} if calibration is None else guides(accounted)
        blind: list[str] = []
        if calibration is not None and measuring:
            _, *heads = next(iter(added.values())).shape
            measure = partial(self._measured, config, calibration.windows, heads)
            # Of two cards that measure, one may break a tie in another way, and guides are in no digest.
            clips, found = measure() if self.team is None else self.team.once(measure)
            blind = [name for name, guide in zip(added, found, strict=True) if not guide.any()]
            provider = Added(provider, added, dict(zip(added, found, strict=True)))
        online = records(
            self.options, accounted, self.rotation, clips.acts, clips.keys, clips.values, guided=bool(added)
        )
        infos = {**model.infos, **added}
        infos = {name: infos[name] for name in sorted(infos, key=natural_key)}
        return replace(model, online=online, infos=infos), provider, blind

    def _measured(
        self, config: Mapping[str, Any], windows: torch.Tensor, heads: Sequence[int]
    ) -> tuple[Clips, list[torch.Tensor]]:
        """Run the model over text: see ``find_clips``."""
        infos = self.model.infos
        transforms = [] if self.rotation is None else list(self.rotation.online)
        runtime = runtime_of(config, infos, transforms, linears_of(infos))
        return find_clips(config, self.provider, runtime, windows, self.device, heads)


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
            where="--device",
            expected="cpu, or cuda where torch finds a GPU",
            found=f"{name}: {str(err).partition(chr(10))[0][:100]}",
        ) from err
    return device


def tokenizer_of(source: Source, hint: str | None = None) -> Any:
    """Load the source's own tokenizer. Raises SourceError, with a hint, where there is none."""
    from transformers import AutoTokenizer

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


def _unguided(names: Sequence[str]) -> tuple[Warning_, ...]:
    """Warn of guides that are 0: the attention of their layers was not seen."""
    if not names:
        return ()
    found = "nothing was seen: the guide is 0, and keys are quantized as without one"
    return (Warning_("guide-empty", name_some(names), "attention that transformers calls by name", found),)


def _too_little(calibration: Calibration | None, model: ModelTensors) -> tuple[Warning_, ...]:
    """Warn where there are fewer windows than asked for, or fewer tokens than inputs of the widest linear."""
    if calibration is None:
        return ()
    widest = max((info.shape[1] for info in linears_of(model.infos).values()), default=0)
    found = []
    if calibration.windows.shape[0] < calibration.wanted:
        found.append(
            Warning_(
                "calibration-short",
                calibration.source,
                f"{calibration.wanted} windows of text",
                f"{calibration.windows.shape[0]} of {calibration.windows.shape[1]} tokens",
            )
        )
    if calibration.tokens < widest:
        found.append(
            Warning_(
                "calibration-few",
                calibration.source,
                f"at least {widest} tokens, the inputs of the widest linear",
                f"{calibration.tokens} tokens",
            )
        )
    return tuple(found)
