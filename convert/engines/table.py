"""The shape of a rule and of an answer.

Four verdicts, worst first: an engine *refuses* the model, loads it and computes something else (*wrong*),
takes a *slow* path (or one that only some GPUs have), or a *note*: it runs, with a loss or a cost worth a
line. Notes never change the verdict of a result: rounding fp16 scales to bf16 is of the size of bf16
arithmetic itself, so calling it wrong would drown the cases that print nonsense.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from w4pack.convert.engines.model import Kind, Model

Verdict = Literal["ok", "refuses", "wrong", "slow"]
Severity = Literal["refuses", "wrong", "slow", "note"]
RANK: Mapping[str, int] = {"refuses": 0, "wrong": 1, "slow": 2, "note": 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule ; ``where`` names a config key, a module or a pattern of modules.

    cure  the way round this one, where the rule's own words are too wide
    """

    where: str
    expected: str
    found: str
    count: int = 1
    cure: str | None = None


ModelTest = Callable[[Model, int], Iterable[Finding]]
KindTest = Callable[[Model, Kind, int], tuple[str, str] | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row.

    id        ``engine.slug``, stable
    verdict   what the engine does
    looks_at  what the test reads, in words
    why       what happens, in words
    cure      the way round, in words; the pasteable command is made by ``cures.suggest``
    test      ``(expected, found)`` or None for a set of like modules and a tensor-parallel size
    whole     instead of ``test``: findings for the whole model
    methods   ``quant_method`` families the row is about; empty: all
    run       seen in the running engine on a CPU (the others are read from its code)
    """

    id: str
    verdict: Severity
    looks_at: str
    why: str
    cure: str
    test: KindTest | None = None
    whole: ModelTest | None = None
    methods: tuple[str, ...] = ()
    run: bool = False

    def findings(self, model: Model, tp: int) -> Iterator[Finding]:
        """Yield what of a model breaks the rule at a tensor-parallel size."""
        if self.whole is not None:
            yield from self.whole(model, tp)
        if self.test is not None:
            for kind in model.kinds:
                hit = self.test(model, kind, tp)
                if hit is not None:
                    yield Finding(kind.where, hit[0], hit[1], len(kind.names))


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine, the version its rules were read from, and the rules.

    artifact  the rules for an artifact, where a plugin of ours runs it; empty: the engine's own
    """

    name: str
    version: str
    rules: tuple[Rule, ...]
    artifact: tuple[Rule, ...] = ()

    def rules_for(self, method: str) -> tuple[Rule, ...]:
        """Return the rules for a family of ``quant_method``."""
        return self.artifact if method == "w4pack" and self.artifact else self.rules


@dataclass(frozen=True, slots=True)
class Blocker:
    """A broken rule.

    ``layer`` is a module, a config key, or a pattern with ``*`` for the layer or expert index when the rule
    hits every module of that pattern; ``count`` says how many. ``cure`` is the way round, in words.
    """

    layer: str
    rule: str
    expected: str
    found: str
    count: int = 1
    verdict: Severity = "refuses"
    cure: str = ""


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The answer of one engine at one tensor-parallel size. ``ok``: it computes what the file says."""

    tp: int
    ok: bool
    verdict: Verdict
    blockers: tuple[Blocker, ...]
    notes: tuple[Blocker, ...] = field(default=())
    engine: str = ""
