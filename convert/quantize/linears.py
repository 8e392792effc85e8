"""One set of linears that read the same input: from weights and statistics to codes.

Whatever happens to a Hessian, the linears get codes: damping grows, and what cannot be factored, has seen too
few tokens, or comes out worse than rounding to nearest, is rounded to nearest, and the report says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from w4pack.convert.core import bitpack
from w4pack.convert.core.quantlinear import GroupParams
from w4pack.convert.core.scheme import QuantScheme
from w4pack.convert.errors import W4PackError
from w4pack.convert.files.provider import is_finite
from w4pack.convert.quantize import gptq, grids
from w4pack.convert.quantize.grids import Grid
from w4pack.convert.quantize.hessian import Statistics, dampings
from w4pack.convert.quantize.overflow import not_finite
from w4pack.convert.quantize.settings import Settings

FEWEST = 64  # tokens below which a Hessian says nothing; a quarter of in_features if that is more


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A few inputs (t, K) float32 to measure with, and the source model's for the same tokens."""

    inputs: torch.Tensor
    reference: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A linear in its codes.

    words   uint32 (K * bits / 32, N): the canonical words
    params  scales in the carrier of their dtype, zero points or None
    report  method, tokens, damping, failed_dampings, error and rtn_error (relative squared errors of the
            outputs), dead_inputs, note
    """

    scheme: QuantScheme
    words: NDArray[np.uint32]
    params: GroupParams
    report: Mapping[str, Any]


def quantize_set(
    weights: Mapping[str, torch.Tensor],
    schemes: Mapping[str, QuantScheme],
    statistics: Statistics | None,
    sample: Sample | None,
    settings: Settings,
) -> dict[str, tuple[Quantized, torch.Tensor]]:
    """Quantize linears of one input. Returns name -> (codes, weights (N, K) float32 that they stand for).

    Args:
        weights: name -> (N, K), any float dtype.
        schemes: name -> scheme.
        statistics: of their input; None: no calibration.
        sample: inputs to measure errors with; None: errors of the weights are measured.
        settings: method and damping.

    Raises:
        Refused: a weight that no scale reaches.
        W4PackError: statistics that are not finite.
    """
    made: dict[str, tuple[Quantized, torch.Tensor]] = {}
    for names in _alike(schemes):
        made.update(_stack({n: weights[n] for n in names}, schemes, statistics, sample, settings))
    return {name: made[name] for name in weights}


def _alike(schemes: Mapping[str, QuantScheme]) -> list[list[str]]:
    """Group names by bits, groups and symmetry: those are solved side by side."""
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for name, s in schemes.items():
        kinds.setdefault((s.bits, s.group_size, s.sym, s.scale_dtype), []).append(name)
    return list(kinds.values())


def _stack(
    weights: Mapping[str, torch.Tensor],
    schemes: Mapping[str, QuantScheme],
    statistics: Statistics | None,
    sample: Sample | None,
    settings: Settings,
) -> dict[str, tuple[Quantized, torch.Tensor]]:
    scheme = schemes[next(iter(weights))]
    joined = torch.cat([w.float().T for w in weights.values()], dim=1)
    try:
        factored, failed, notes = _factored(scheme, statistics, settings)
        grid = grids.search(joined, scheme, _importance(statistics, factored))
    except W4PackError as err:
        err.where = ", ".join(weights)
        raise
    solved = None
    if factored is not None and statistics is not None:
        shift, strength = statistics.mean_shift(), settings.strength
        solved = gptq.solve(joined, factored, grid, scheme, shift=shift, strength=strength)
    rounded = grids.nearest(joined, grid, scheme)
    codes = rounded if solved is None else solved.codes
    made: dict[str, tuple[Quantized, torch.Tensor]] = {}
    column = 0
    for name, weight in weights.items():
        part = slice(column, column + weight.shape[0])
        column += weight.shape[0]
        own = Grid(grid.scales[:, part], grid.zeros[:, part])
        report = {
            "method": "rtn" if solved is None else "gptq",
            "tokens": statistics.tokens if statistics is not None else 0,
            **({"damping": solved.damping} if solved is not None else {}),
            **({"failed_dampings": failed} if failed else {}),
            **({"dead_inputs": solved.dead} if solved is not None and solved.dead else {}),
            **({"note": notes} if notes else {}),
        }
        choice = _better(joined[:, part], codes[:, part], rounded[:, part], own, scheme, sample, report)
        made[name] = _finish(choice, own, schemes[name], report)
    return made


def _factored(
    scheme: QuantScheme, statistics: Statistics | None, settings: Settings
) -> tuple[gptq.Factored | None, list[float], str | None]:
    """Return the factored Hessian, or None and the reason why the linears are rounded to nearest.

    Between the two: the values of the damping that were too little.
    """
    if settings.method == "rtn":
        return None, [], None
    tokens = statistics.tokens if statistics is not None else 0
    fewest = max(FEWEST, scheme.in_features // 4)
    if statistics is None or (tokens < fewest and statistics.routed):
        return None, [], f"{tokens} tokens, fewer than {fewest}"
    hessian = statistics.hessian()
    if not is_finite(hessian):
        raise not_finite("", "a Hessian that is not finite", statistics.peak, torch.float32)
    if not bool(torch.diagonal(hessian).any()):  # GPTQ would take weights that nothing is known of for 0
        return None, [], "every input was 0"
    found = gptq.factored(hessian, settings.damping)
    if found is None:
        return None, dampings(settings.damping), "the Hessian cannot be factored at any damping"
    return found, [share for share in dampings(settings.damping) if share < found.damping], None


def _importance(statistics: Statistics | None, factored: gptq.Factored | None) -> torch.Tensor | None:
    """Return what errors of each input cost (K,), for the search: after GPTQ's corrections where it runs."""
    if factored is not None:
        return factored.importance()
    return statistics.importance() if statistics is not None and statistics.tokens else None


def _better(
    weights: torch.Tensor,
    codes: torch.Tensor,
    rounded: torch.Tensor,
    grid: Grid,
    scheme: QuantScheme,
    sample: Sample | None,
    report: dict[str, Any],
) -> torch.Tensor:
    """Measure both ways of rounding on the sample, write errors into the report, return the better codes."""
    target = weights if sample is None else sample.reference @ weights
    norm = float(target.double().square().sum()) or 1.0

    def error(candidate: torch.Tensor) -> float:
        made = grids.dequantize(candidate, grid, scheme)
        if sample is not None:
            made = sample.inputs @ made
        return float((made - target).double().square().sum()) / norm

    report["rtn_error"] = error(rounded)
    report["error"] = report["rtn_error"] if report["method"] == "rtn" else error(codes)
    if not report["error"] <= report["rtn_error"]:
        report.update(method="rtn", error=report["rtn_error"], note="GPTQ was worse than rounding to nearest")
        return rounded
    return codes


def _finish(
    codes: torch.Tensor, grid: Grid, scheme: QuantScheme, report: dict[str, Any]
) -> tuple[Quantized, torch.Tensor]:
    weights = grids.dequantize(codes, grid, scheme).T
    words = words_of(codes, scheme.bits)
    zeros = None if scheme.sym else grid.zeros.to(torch.uint8).cpu().numpy()
    params = GroupParams(carrier(grid.scales, scheme.scale_dtype), zeros, None)
    return Quantized(scheme, words, params, report), weights


def words_of(codes: torch.Tensor, bits: int) -> NDArray[np.uint32]:
    """Pack codes uint8 (K, N) to canonical words (K * bits / 32, N), where they lie."""
    if codes.device.type == "cpu":
        return bitpack.pack_rows(np.ascontiguousarray(codes.numpy()), bits)
    per_word, (rows, columns) = 32 // bits, codes.shape
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -rows % per_word)).view(-1, per_word, columns)
    words = torch.zeros(padded.shape[0], columns, dtype=torch.int32, device=codes.device)
    for place in range(per_word):
        words |= padded[:, place].int() << (bits * place)
    host = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)  # used again by the next layer
    found: NDArray[np.uint32] = host.copy_(words).numpy().view(np.uint32)
    return found


def carrier(values: torch.Tensor, tag: str) -> NDArray[Any]:
    """Return float32 values as numpy carries them under ``tag``; they must be values of that dtype."""
    stored = values.to(grids.SCALE_DTYPES[tag]).cpu().contiguous()
    if tag == "BF16":
        bits: NDArray[Any] = stored.view(torch.int16).numpy().view(np.uint16)
        return bits
    plain: NDArray[Any] = stored.numpy()
    return plain
