"""What a quantization did, in Markdown: how, on what, how much was lost and where."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

WORST = 10  # linears that are listed by name


class _Planned(Protocol):
    """The part of a plan that is told (plans live above this module)."""

    @property
    def quantization(self) -> Mapping[str, Any] | None: ...


def report(
    plan: _Planned,
    reports: Mapping[str, Mapping[str, Any]],
    outcome: Mapping[str, Any],
    pictures: Mapping[str, str] | None = None,
    *,
    settings: Mapping[str, tuple[Any, Any]],
) -> str:
    """Return the report: settings, calibration, errors by kind of linear, the worst ones, what fell back.

    settings  name of each setting that acts -> (value, default)
    pictures  file name beside the report -> title
    """
    layers = {name: r for name, r in reports.items() if "error" in r}
    shown = [f"![{title}]({name})" for name, title in (pictures or {}).items()]
    parts = [_settings(plan, outcome, settings), _kinds(layers, error_of(plan)), *shown, _worst(layers)]
    parts += [_fallbacks(layers), _damped(layers), _chosen(outcome), _experts(outcome)]
    return "\n\n".join(part for part in parts if part)


def error_of(plan: _Planned) -> str:
    """Return what the errors of linears are: without calibration there are no outputs to measure."""
    calibrated = (plan.quantization or {}).get("calibration") is not None
    return f"Relative squared error of {'outputs' if calibrated else 'weights'}"


def _settings(plan: _Planned, outcome: Mapping[str, Any], settings: Mapping[str, tuple[Any, Any]]) -> str:
    record = plan.quantization or {}
    lines = [f"- {key.replace('_', ' ')}: {_beside(*pair)}" for key, pair in settings.items()]
    lines.append(f"- bits per weight of the quantized linears, in the file: {record['bits_per_weight']}")
    text = record.get("calibration")
    if text:
        lines.append(
            f"- calibrated on {text['tokens']:,} tokens of {text['source']}: {text['windows']} windows of "
            f"{text['seqlen']}, digest `{text['digest'][:16]}`"
        )
    if "kl" in outcome:
        lines.append(
            f"- divergence from the source on {outcome['kl_tokens']} calibration tokens: "
            f"{outcome['kl']:.3g} nats a token"
        )
    return "\n".join(lines)


def _beside(value: Any, default: Any) -> str:
    """Return a value and its default."""
    value, default = _shown(value), _shown(default)
    return f"{value} (default)" if value == default else f"{value} (default {default})"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "none"}[value]
    return str(value)


def _kinds(layers: Mapping[str, Mapping[str, Any]], title: str) -> str:
    """Return a table of the errors, by the last part of the name."""
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for name, entry in layers.items():
        kinds[name.rpartition(".")[2]].append(entry)
    rows = []
    for kind, found in sorted(kinds.items()):
        own, nearest = ([e[key] for e in found] for key in ("error", "rtn_error"))
        rows.append(
            f"| `{kind}` | {len(found)} | {sum(own) / len(own):.3e} | {max(own):.3e} "
            f"| {sum(nearest) / len(nearest):.3e} |"
        )
    head = "| linears | count | mean error | largest | mean, rounded to nearest |\n|---|---|---|---|---|"
    return f"{title}:\n\n" + "\n".join([head, *rows])


def _worst(layers: Mapping[str, Mapping[str, Any]]) -> str:
    names = sorted(layers, key=lambda n: (-layers[n]["error"], n))[:WORST]
    rows = [f"| `{n}` | {layers[n]['method']} | {layers[n]['error']:.3e} |" for n in names]
    return "Largest errors:\n\n| linear | method | error |\n|---|---|---|\n" + "\n".join(rows)


def _fallbacks(layers: Mapping[str, Mapping[str, Any]]) -> str:
    """Name what was not quantized as asked for, by reason."""
    notes: Counter[str] = Counter(entry["note"] for entry in layers.values() if entry.get("note"))
    if not notes:
        return ""
    lines = []
    for note, count in notes.most_common():
        names = [n for n, entry in layers.items() if entry.get("note") == note][:WORST]
        more = f" and {count - len(names)} more" if count > len(names) else ""
        lines.append(f"- {note}: {', '.join(f'`{n}`' for n in names)}{more}")
    return "Rounded to nearest:\n\n" + "\n".join(lines)


def _damped(layers: Mapping[str, Mapping[str, Any]]) -> str:
    """Name the linears whose Hessian took more damping than was asked for."""
    found = [
        (name, entry["damping"])
        for name, entry in layers.items()
        if "damping" in entry and entry.get("failed_dampings")
    ]
    rows = [f"- `{name}`: {damping:.3g}" for name, damping in found]
    return "Damping that a Hessian took where less was not enough:\n\n" + "\n".join(rows) if rows else ""


def _chosen(outcome: Mapping[str, Any]) -> str:
    """Return what more bits than the fewest have saved, where a number of bits per weight was asked for."""
    chosen: Mapping[str, Mapping[str, Any]] = outcome.get("chosen", {})
    if not chosen:
        return ""
    raised = {n: why for n, why in chosen.items() if why["error"] < why["error_cheapest"]}
    text = (
        f"Bits per weight: {len(raised)} of {len(chosen)} linears have more bits than the cheapest scheme, "
        "where those take away most error of the weights for their size"
    )
    names = sorted(raised, key=lambda n: (raised[n]["error"] - raised[n]["error_cheapest"], n))[:WORST]
    rows = [
        f"| `{n}` | {why['error']:.2e} | {why['error_cheapest']:.2e} with {why['cheapest']} |"
        for n, why in ((n, raised[n]) for n in names)
    ]
    head = "| linear | error | it would be |\n|---|---|---|"
    return "\n".join([f"{text}:\n\n{head}", *rows]) if rows else f"{text}."


def _experts(outcome: Mapping[str, Any]) -> str:
    """Return how many tokens experts got, the fewest and the most of each layer."""
    counts = outcome.get("expert_tokens")
    if not counts:
        return ""
    rows = [f"| `{name}` | {len(c)} | {min(c)} | {max(c)} | {sum(c)} |" for name, c in counts.items()]
    head = "| experts | count | fewest tokens | most | all |\n|---|---|---|---|---|"
    return "Tokens of experts:\n\n" + "\n".join([head, *rows])
