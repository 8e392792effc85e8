"""The model of a plan, ready for its first layer, for a process alone and for those of a team."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from w4pack.convert.modeljobs.online import Runtime, runtime_of
from w4pack.convert.modeljobs.prepared import Prepared
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.plan import Plan
from w4pack.convert.planning.quantize_options import LEFT
from w4pack.convert.planning.unquantized import asked_of
from w4pack.convert.quantize.settings import Settings
from w4pack.convert.quantize.team import Team
from w4pack.convert.quantize.whole import ModelRun

STRENGTH = 0.25  # of GPTAQ, chosen on text that is neither calibrated nor measured with (docs/benchmarks.md)
# What a leader says to its team (``quantize.team``) before a layer, and at the end.
QUANTIZE, REPEAT, STOPPED, FINISHED = "quantize", "repeat", "stopped", "finished"


def settings_of(options: ConvertOptions) -> Settings:
    """Return how codes are chosen."""
    asked = asked_of(options)
    strength = STRENGTH if asked.gptaq and asked.method == "gptq" else 0.0
    return Settings(asked.method, asked.damp, strength, sinks=asked.act_bits == LEFT)


def model_run(
    prepared: Prepared, plan: Plan, team: Team | None = None, check: Callable[[], None] | None = None
) -> ModelRun:
    """Return the model of a plan, ready for its first layer. ``check`` may raise within a layer."""
    config = {**prepared.source.config, **plan.config_changes}
    layers = {layer.source: layer for layer in plan.layers}
    records = (plan.quant_config or {}).get("online")
    return ModelRun(
        config,
        prepared.provider,
        {name: layer.scheme for name, layer in layers.items()},
        prepared.windows,
        settings_of(prepared.options),
        prepared.device,
        _runtime(config, prepared, records, layers) if records else None,
        team,
        prepared.ahead,
        check,
    )


def _runtime(config: Mapping[str, Any], prepared: Prepared, records: Any, layers: Iterable[str]) -> Runtime:
    return runtime_of(config, prepared.model.infos, records, layers, read=prepared.provider.get)


def say(team: Team | None, word: str) -> None:
    """Tell a team what comes next, where there is one."""
    if team is not None:
        team.told(word)
