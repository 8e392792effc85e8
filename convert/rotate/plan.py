"""The plan of a rotation: which rotations there are, what each tensor takes, what stays and why.

Made from the config and the headers alone; no tensor is read. ``offline`` rotates the residual stream (r1)
and the value heads (r2), and the latents of low-rank attention: the model stays an ordinary checkpoint of its
class. ``full`` adds what a runtime has to undo while it runs: q and k (r3), across heads, the MLP's inside
(r4), and the stream in front of each reader where it cannot be rotated for good.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from w4pack.convert.core.facts import Warning_
from w4pack.convert.core.families import TEXT_SECTIONS
from w4pack.convert.errors import Refused, W4PackError, name_some
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.rotate.accounting import Layer, Model, account
from w4pack.convert.rotate.architecture import find
from w4pack.convert.rotate.folding import Folding, head_size
from w4pack.convert.rotate.rotation import Rotation, make_rotation
from w4pack.convert.rotate.steps import Step

Mode = Literal["offline", "full"]
SPLIT_KINDS = ("heads", "r4")  # transforms over what ranks share
TIE = "tie_word_embeddings"


@dataclass(frozen=True)
class RotationPlan:
    """Everything that decides the rotated weights.

    rotations       all of them, in the order of the model
    steps           tensor name of the output -> what is done to it; tensors without steps stay as they are
    added           tensor name -> tensor of the source that it starts from: a head that was tied
    config_changes  top-level keys of config.json
    online          records of the transforms that a runtime applies (artifact: ``online``)
    left_out        (site, reason) of every rotation that the model does not allow
    warnings        what the user is told beside
    """

    mode: str
    seed: int
    parts: int
    rotations: tuple[Rotation, ...]
    steps: Mapping[str, tuple[Step, ...]]
    added: Mapping[str, str]
    config_changes: Mapping[str, Any]
    online: tuple[Mapping[str, Any], ...]
    left_out: tuple[tuple[str, str], ...]
    warnings: tuple[Warning_, ...]

    @property
    def stream(self) -> Rotation | None:
        """The rotation of the residual stream, or None."""
        return next((r for r in self.rotations if r.kind == "r1"), None)

    def to_json(self) -> dict[str, Any]:
        """Return what the manifest records: every rotation with its digest, and one digest of all steps."""
        steps = sorted((name, repr(step)) for name, steps in self.steps.items() for step in steps)
        return {
            "mode": self.mode,
            "seed": self.seed,
            "tp": self.parts,
            "rotations": [r.to_json() for r in self.rotations],
            "online": [dict(record) for record in self.online],
            "added": dict(self.added),
            "left_out": [{"site": site, "reason": reason} for site, reason in self.left_out],
            "steps": hashlib.sha256(repr(steps).encode()).hexdigest(),
        }


def plan_rotation(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    mode: Mode = "offline",
    *,
    seed: int = 0,
    parts: int = 1,
) -> RotationPlan:
    """Plan the rotation of a model.

    parts  tensor parallelism that the online transforms must not cross

    Raises Refused for an architecture without a description, for tensors that nothing accounts for, and for
    ``parts`` that do not divide what they cut; SourceError for a model that is not what its config says.
    """
    architecture = find(config)
    planner = _Planner(account(architecture, config, tensors), seed, parts)
    planner.offline()
    if mode == "full":
        planner.full()
    planner.refuse_parts()
    planner.refuse_strays()
    if planner.problems:
        raise Refused.together(planner.problems)
    return planner.plan(mode)


def _why_none(n: int, parts: int) -> str:
    """Return why there is no transform of order n, in so many parts."""
    if n == parts:
        return (
            f"one of {n} on each of {parts} ranks: nothing to mix"
            if parts > 1
            else "one alone: nothing to mix"
        )
    return f"no Hadamard matrix of order {n // parts} or of a divisor above 1"


class _Planner:
    """Collects rotations, steps and reasons, site by site."""

    def __init__(self, model: Model, seed: int, parts: int) -> None:
        self.model, self.seed, self.parts = model, seed, parts
        self.folding = Folding(model)
        self.rotations: list[Rotation] = []
        self.left_out: dict[str, str] = {}
        self.online: list[dict[str, Any]] = []
        self.undivided: dict[int, str] = {}  # what the ranks do not divide -> its site
        self.problems: list[W4PackError] = []
        self.warnings: list[Warning_] = []
        self.r1: Rotation | None = None

    # ------------------------------------------------------------ offline

    def offline(self) -> None:
        """Rotate what stays rotated in the file."""
        reason = self._why_not_stream()
        if reason is None:
            self.r1 = self._make("r1", self._hidden(), -1, ones=self.model.architecture.norm == "layer")
        else:
            self.left_out["r1"] = reason
        if self.r1 is not None:
            self.folding.stream(self.r1)
        for layer in self.model.layers:
            self._latents(layer)
            self._values(layer)

    def _hidden(self) -> int:
        table = self.model.tensors[f"{self.model.architecture.embeddings[0]}.weight"]
        return table.shape[-1]

    def _why_not_stream(self) -> str | None:
        """Return why the stream cannot be rotated, with the name of what is in the way, or None."""
        for condition in self.model.architecture.conditions:
            found = self.model.config.get(condition.key, condition.value)
            if found != condition.value:
                return f"config.json: {condition.key} is {found}: {condition.reason}"
        for layer in self.model.layers:
            for block in (layer.attention, layer.mlp):
                if block.post_norm:
                    return (
                        f"`{block.post_norm}.weight` is a gain between a block and the stream that it is "
                        "added to: it does not commute with a rotation"
                    )
        return None

    def _latents(self, layer: Layer) -> None:
        architecture, model = self.model.architecture, self.model
        for latent in architecture.latents:
            if model.has(f"{layer.prefix}{latent.down}.weight"):
                rotation = self._make(latent.kind, model.number(latent.size), layer.index)
                if rotation is not None:
                    self.folding.latent(layer, latent, rotation)
        if architecture.nope:
            rotation = self._make("nope", model.number("qk_nope_head_dim"), layer.index)
            if rotation is not None:
                self.folding.nope(layer, rotation)

    def _values(self, layer: Layer) -> None:
        size = head_size(self.model, layer)
        r2 = self._make("r2", size, layer.index)
        if r2 is not None:
            self.folding.values(layer, r2, size)

    # ------------------------------------------------------------ online

    def full(self) -> None:
        """Add the transforms that a runtime applies, and their other halves in the weights."""
        first = self.model.layers[0] if self.model.layers else None
        if first is None:
            return
        self._stream_online()
        self._q_and_k(head_size(self.model, first))
        for layer in self.model.layers:
            self._across_heads(layer)
            for module in layer.mlp.writers:
                self._mlp(module)

    def _stream_online(self) -> None:
        """Where the stream cannot be rotated for good: a transform in front of each reader, gain first."""
        if self.r1 is not None:
            return
        rotation = self._fixed("r1_online", self._hidden(), 1, "residual_read")
        if rotation is None:
            return
        for layer in self.model.layers:
            for module in (*layer.attention.readers, *layer.mlp.readers):
                self.folding.columns(module, rotation)

    def _q_and_k(self, size: int) -> None:
        rope = self.model.config.get("qk_rope_head_dim") if self.model.architecture.latents else None
        self._fixed("r3", rope if isinstance(rope, int) else size, 1, "qk")

    def _across_heads(self, layer: Layer) -> None:
        rotation = self._fixed("heads", self.model.heads, self.parts, "attn_out")
        if rotation is not None:
            self.folding.across_heads(layer, rotation, head_size(self.model, layer))

    def _mlp(self, module: str) -> None:
        size = self.model.tensors[f"{module}.weight"].shape[-1]
        rotation = self._fixed("r4", size, self.parts, "mlp_mid")
        if rotation is not None:
            self.folding.columns(module, rotation)

    def _fixed(self, kind: str, n: int, parts: int, site: str) -> Rotation | None:
        """Make a transform without signs and record it once; note what ``parts`` do not divide."""
        if n % parts:
            self.undivided.setdefault(n, site)
            return None
        rotation = self._make(kind, n, -1, parts=parts, signs=False)
        if rotation is not None:
            record = {
                "kind": "hadamard",
                "site": site,
                "order": rotation.n,
                "factors": [[m, construction] for m, construction in rotation.factors],
                "block": rotation.block,
                "signs": None,
            }
            if record not in self.online:
                self.online.append(record)
        return rotation

    def _make(
        self, kind: str, n: int, layer: int, *, parts: int = 1, signs: bool = True, ones: bool = False
    ) -> Rotation | None:
        """Make a rotation and keep it; say so where it is none, or is blocks in place of one matrix."""
        rotation = make_rotation(kind, n, layer, seed=self.seed if signs else None, parts=parts, ones=ones)
        if rotation is None:
            self.left_out[kind] = _why_none(n, parts)
            return None
        if rotation not in self.rotations:
            self.rotations.append(rotation)
        if rotation.block != n:
            asked = f" in {parts} parts" if parts > 1 else ""
            found = f"blocks of {rotation.block}"
            warning = Warning_("rotation-blocks", kind, f"one Hadamard matrix of order {n}{asked}", found)
            if parts == 1 and warning not in self.warnings:
                self.warnings.append(warning)
        return rotation

    # ------------------------------------------------------------ the end

    def refuse_parts(self) -> None:
        """Refuse ranks that do not divide what online transforms run over, all of it in one problem."""
        if not self.undivided:
            return
        fits = math.gcd(*(r.n for r in self.rotations if r.kind in SPLIT_KINDS), *self.undivided)
        ways = ", ".join(str(ranks) for ranks in range(1, 9) if fits % ranks == 0)
        named = " and ".join(f"{n} ({site})" for n, site in self.undivided.items())
        self.problems.append(
            Refused(
                f"{self.parts} ranks do not divide what online transforms run over",
                code="tp-parts",
                where=f"--tp {self.parts}",
                expected=f"a divisor of {named}",
                found=str(self.parts),
                hint=f"--tp: {ways}",
            )
        )

    def refuse_strays(self) -> None:
        """Refuse what nobody accounts for: every tensor if the stream is rotated, else those of attention."""
        writers = [module for layer in self.model.layers for module in layer.attention.writers]
        attention = tuple(f"{module.rpartition('.')[0]}." for module in writers)
        for name in self.model.strays:
            if self.r1 is None and not name.startswith(attention):
                continue
            info = self.model.tensors[name]
            self.problems.append(
                Refused(
                    "nothing says what this tensor has to do with the residual stream",
                    code="unknown-tensor",
                    where=f"{info.file}, {name}",
                    expected="tensors that the architecture's description names",
                    found=f"{info.dtype} {list(info.shape)}",
                    hint="`--rotate none` leaves the weights as they are; docs/concepts/rotation.md says how "
                    "to describe an architecture",
                )
            )

    def plan(self, mode: Mode) -> RotationPlan:
        """Put together what was found. Raises Refused if nothing at all can be rotated."""
        if not self.rotations:
            site, reason = next(iter(self.left_out.items()))
            raise Refused(
                "nothing of this model can be rotated",
                code="nothing-to-rotate",
                where=site,
                found=reason,
                hint="`--rotate none` leaves the weights as they are",
            )
        reasons: dict[str, list[str]] = {}
        for site, reason in self.left_out.items():
            reasons.setdefault(reason, []).append(site)
        for reason, sites in reasons.items():
            warning = Warning_("rotation-left-out", name_some(sites), "a rotation", f"none: {reason}")
            self.warnings.append(warning)
        return RotationPlan(
            mode,
            self.seed,
            self.parts,
            tuple(self.rotations),
            {name: tuple(steps) for name, steps in self.folding.steps.items()},
            self._added(),
            self._config_changes(),
            tuple(self.online),
            tuple(self.left_out.items()),
            tuple(self.warnings),
        )

    def _added(self) -> dict[str, str]:
        """Return the head that a tied model did not have to store."""
        architecture = self.model.architecture
        if not (self.model.tied and self.r1 is not None):
            return {}
        return {f"{architecture.head}.weight": f"{architecture.embeddings[0]}.weight"}

    def _config_changes(self) -> dict[str, Any]:
        """Return the config keys that untie the head, nested copies of the key too."""
        if not (self.model.tied and self.r1 is not None):
            return {}
        changes: dict[str, Any] = {TIE: False}
        for section in TEXT_SECTIONS:
            block = self.model.config.get(section)
            if isinstance(block, Mapping) and TIE in block:
                changes[section] = {**block, TIE: False}
        return changes
