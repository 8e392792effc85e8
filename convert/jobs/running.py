"""How a conversion is run, what it reports, and whom it tells: none of this decides bytes."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from w4pack.convert import formats
from w4pack.convert.core.facts import ModelFacts, Warning_
from w4pack.convert.errors import UsageError
from w4pack.convert.events import Quiet, Reporter
from w4pack.convert.jobs import work
from w4pack.convert.jobs.execute import StopFlag
from w4pack.convert.jobs.journal import Earlier
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.targets import TARGETS
from w4pack.convert.source.detect import Source

MAX_KL = 4.0  # nats a token, mean: above it the result is no longer the model

CardMaker = Callable[[Plan, Mapping[str, float]], str]  # plan, error of each re-quantized layer -> README.md
OnPlan = Callable[[Plan, Sequence[Warning_], ModelFacts, Source], None]


def check_device(name: str) -> None:
    """Raise UsageError for a name that no device has here, whether torch is installed or not."""
    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) is None:
        raise UsageError(
            "no such device",
            code="no-device",
            where="--device",
            expected="cpu, cuda or cuda:N",
            found=name,
            hint="--device cpu",
        )


def check_limit(max_kl: float) -> None:
    """Raise UsageError for a limit of the divergence that is none: NaN and infinity would let all pass."""
    if not 0 <= max_kl < math.inf:
        raise UsageError(
            "no such limit",
            where="--max-kl",
            expected="nats a token, 0 or more; 1000, say, lets everything pass",
            found=f"{max_kl:g}",
        )


@dataclass(frozen=True, slots=True)
class Running:
    """How to run: none of this decides bytes, but the last bits of what a device computes.

    threads  0: one per core, at most 8
    device   where quantization computes: ``cpu``, ``cuda`` or ``cuda:1``
    packer   makes Marlin tiles, e.g. ``kernels.packing.packer_on("cuda")``; None: numpy does, on the CPU
    max_kl   divergence, nats a token, above which a calibrated quantization is not published
    """

    threads: int = 0
    resume: bool = False
    overwrite: bool = False
    strict: bool = False
    reporter: Reporter = field(default_factory=Quiet)
    stop: StopFlag = field(default_factory=StopFlag)
    device: str = "cpu"
    packer: work.Packer | None = None
    max_kl: float = MAX_KL

    @property
    def workers(self) -> int:
        """Number of threads."""
        return self.threads or min(len(os.sched_getaffinity(0)), 8)

    def tell_kept(self, earlier: Earlier, kept: int, plan: Plan) -> None:
        """Say, where ``--resume`` was given, how many steps of a plan the earlier run has spared this one."""
        for text in earlier.told(kept, len(plan.ops)) if self.resume else ():
            self.reporter.event("note", text=text)

    def packed_on(self, plan: Plan) -> str | None:
        """Return the device that packs a plan's layers; None where they do not become Marlin tiles."""
        layout = TARGETS[plan.target].layout
        packed = any(layer.action != "dense" for layer in plan.layers)
        if layout is None or not packed or not work.packs_tiles(formats.get(layout)):
            return None
        return "cpu" if self.packer is None else self.packer.device


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did.

    errors        relative Frobenius error of each re-quantized layer
    was_complete  OUT was already the published result of this plan (``--resume``); nothing was written
    packed_on     the device that made Marlin tiles, None where nothing became tiles
    followed      another process of a team has written OUT
    """

    out: Path
    plan: Plan
    warnings: tuple[Warning_, ...]
    seconds: float
    errors: Mapping[str, float]
    was_complete: bool = False
    packed_on: str | None = None
    followed: bool = False

    @property
    def lossless(self) -> bool:
        """Claim: codes, zeros, scales and order are those of the source, bit for bit."""
        return self.plan.lossless

    @property
    def target(self) -> str:
        """The target, as ``--to`` names it."""
        return self.plan.target
