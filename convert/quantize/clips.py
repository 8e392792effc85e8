"""How much of the range of a quantizer is given up: ratios that are tried, and which of them is the best.

With a smaller ratio more values are clipped and all others are rounded more finely. What a ratio costs is
measured on the predictions of the whole model: the error of a single product says little, because a few
tokens that all others attend to must not shrink. Errors of many layers meet there, so costs of neighbouring
ratios differ by chance: a smooth curve through their logarithms decides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from w4pack.convert.core.scheme import RUN_CODES

Table = Mapping[int, float]  # bits -> ratio

RATIOS = {4: (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0), 8: (0.95, 1.0)}
CACHE_RATIOS = {4: (0.85, 0.9, 0.95, 1.0), 8: (0.95, 1.0)}
ACT_DEFAULTS: Table = {4: 0.9, 8: 1.0}  # where nothing is measured
KV_DEFAULTS: Table = {4: 0.95, 8: 1.0}
KEYS, VALUES = "k", "v"
TINY = 1e-12  # nats: what has cost nothing


@dataclass(frozen=True, slots=True)
class Clips:
    """The ratios of a model: of the activations of each site, of keys, of values."""

    acts: Mapping[str, Table]
    keys: Table
    values: Table

    def to_json(self) -> dict[str, Any]:
        """Return JSON values from which ``from_json`` makes the same ratios."""
        acts = {site: _plain(table) for site, table in self.acts.items()}
        return {"acts": acts, KEYS: _plain(self.keys), VALUES: _plain(self.values)}

    @classmethod
    def from_json(cls, value: Any) -> "Clips":
        """Rebuild ratios. Raises ValueError for anything but the result of ``to_json``."""
        try:
            acts = {str(site): _table(table) for site, table in value["acts"].items()}
            return cls(acts, _table(value[KEYS]), _table(value[VALUES]))
        except (KeyError, TypeError, AttributeError) as err:
            raise ValueError(f"no clip ratios: {err}") from err


@dataclass(frozen=True, slots=True)
class Trial:
    """One quantizer alone. what: a site of activations, or ``k`` or ``v`` of the cache."""

    what: str
    bits: int
    ratio: float


def trials(sites: Mapping[str, str]) -> list[Trial]:
    """Return everything to try for a model: module -> site."""
    tried = [(site, RATIOS) for site in dict.fromkeys(sites.values())]
    tried += [(what, CACHE_RATIOS) for what in (KEYS, VALUES)]
    return [Trial(what, bits, ratio) for what, table in tried for bits in RUN_CODES for ratio in table[bits]]


@dataclass(slots=True)
class Costs:
    """What trials cost: nats a token."""

    found: dict[Trial, float] = field(default_factory=dict)

    def clips(self, sites: Mapping[str, str]) -> Clips:
        """Return the best ratio of everything."""
        acts = {site: self._best(site, ACT_DEFAULTS) for site in dict.fromkeys(sites.values())}
        return Clips(acts, self._best(KEYS, KV_DEFAULTS), self._best(VALUES, KV_DEFAULTS))

    def _best(self, what: str, defaults: Table) -> dict[int, float]:
        """Return bits -> the ratio of least cost; a default where none was tried."""
        made = {}
        for bits in RUN_CODES:
            costs = {t.ratio: c for t, c in self.found.items() if (t.what, t.bits) == (what, bits)}
            made[bits] = cheapest(costs) if costs else defaults[bits]
        return made


def cheapest(costs: Mapping[float, float]) -> float:
    """Return the ratio at which the curve through the costs is lowest, of equals the largest.

    The curve is a polynomial of degree 3 for 8 ratios and more, of degree 2 from 4 on; fewer speak for
    themselves.
    """
    ratios = np.array(sorted(costs, reverse=True))
    logs = np.log(np.maximum([costs[r] for r in ratios.tolist()], TINY))
    degree = 3 if len(ratios) >= 8 else 2 if len(ratios) >= 4 else 0
    curve = np.polyval(np.polyfit(ratios, logs, degree), ratios) if degree else logs
    return float(ratios[int(np.argmin(curve))])


def _plain(table: Table) -> dict[str, float]:
    return {str(bits): ratio for bits, ratio in table.items()}


def _table(value: Any) -> dict[int, float]:
    table = {int(bits): float(ratio) for bits, ratio in value.items()}
    if set(table) != set(RUN_CODES) or not all(0 < ratio <= 1 for ratio in table.values()):
        raise ValueError(f"no ratios of {RUN_CODES} bits: {value}")
    return table
