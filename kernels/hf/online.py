"""What an artifact's ``online`` records ask for of its model: decided from headers, before a tensor is read.

Which modules stand at which site is read from the architecture's description, the one that the converter
rotates by.
"""

from dataclasses import dataclass

from w4pack.convert.core.scheme import WIDE
from w4pack.convert.dialects.online import Online, Settings
from w4pack.convert.errors import Refused, W4PackError
from w4pack.convert.source.online_places import Linear, Place, place, plain
from w4pack.convert.source.online_rules import misfits, without_kernel
from w4pack.kernels.artifact import Artifact

OPTIONS = (f"--act-bits {WIDE}", f"--kv-bits {WIDE}")


@dataclass(frozen=True, slots=True)
class OnlinePlan:
    """What runs between the linears of one model.

    records   of the artifact
    settings  bits that were chosen
    at        the places that the records speak of
    """

    records: Online
    settings: Settings
    at: Place


def plan(
    artifact: Artifact, act_bits: int | None = None, kv_bits: int | None = None, *, of_command: bool = False
) -> OnlinePlan | None:
    """Decide what runs between the linears; None: nothing.

    Args:
        artifact: opened.
        act_bits: that were asked for; None: as it was calibrated.
        kv_bits: likewise.
        of_command: whether refusals are to name options, not parameters of ``load``.

    Raises:
        UsageError: bits that the records do not have.
        Refused: an architecture without description, transforms of other sizes than the model's, layers that
            no integer product takes.
    """
    records = artifact.online
    settings = records.settings(act_bits, kv_bits)
    if not records:
        return None
    at = place(artifact.config, artifact.tensors, _linears(artifact))
    problems = (*misfits(records, at), *without_kernel(records, settings, at))
    if problems:
        raise Refused.together(problems if of_command else [_of_load(problem) for problem in problems])
    return OnlinePlan(records, settings, at)


def _of_load(problem: W4PackError) -> W4PackError:
    """Let a refusal whose way on is an option name the parameter."""
    if problem.hint in OPTIONS:
        name, bits = problem.hint.removeprefix("--").split()
        problem.hint = f"load with {name.replace('-', '_')}={bits}"
    return problem


def _linears(artifact: Artifact) -> dict[str, Linear]:
    packed = {
        name: Linear.of_codes(spec.in_features, sym=spec.sym, act_order=spec.act_order)
        for name, spec in artifact.specs.items()
    }
    return plain(artifact.tensors[name] for name in artifact.dense) | packed
