"""Reads an artifact's ``online`` records, strictly: what is not known to the last key is refused."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from w4pack.convert.core.scheme import RUN_BITS, RUN_CODES, WIDE
from w4pack.convert.dialects.online import (
    ACT_SITES,
    HADAMARD_SITES,
    ActQuant,
    Clips,
    Factors,
    Hadamard,
    KVQuant,
    Online,
)
from w4pack.convert.dialects.reading import shown
from w4pack.convert.errors import Refused, UsageError, W4PackError

CLIP_KEYS = tuple(map(str, RUN_CODES))
KEYS = {
    "hadamard": ("kind", "site", "order", "factors", "block", "signs"),
    "act_quant": ("kind", "site", "bits", "clip", "symmetric"),
    "kv_quant": ("kind", "bits", "clip", "group", "guide"),
}


def parse(online: Any, where: str = "quantization_config") -> Online:
    """Read the value of ``online``.

    where  of the block that holds it, for messages

    Raises:
        Refused: anything that is not known here; lists every problem.
    """
    if not isinstance(online, list):
        raise _refused(f"{where}.online", "a list of records", online)
    problems: list[W4PackError] = []
    found: list[Hadamard | ActQuant | KVQuant] = []
    for number, record in enumerate(online):
        reader = _Reader(record, f"{where}.online.{number}")
        made = reader.record()
        problems += reader.problems
        if made is not None and not reader.problems:
            found.append(made)
    problems += _twice(found, f"{where}.online")
    if problems:
        raise Refused.together(problems)
    kv = [record for record in found if isinstance(record, KVQuant)]
    whole = Online(
        tuple(record for record in found if isinstance(record, Hadamard)),
        {record.site: record for record in found if isinstance(record, ActQuant)},
        kv[0] if kv else None,
    )
    try:
        whole.settings()
    except UsageError as err:  # each record has a ratio for its own bits, but not all for the largest
        raise _refused(f"{where}.online", "ratios for the bits of the calibration", err.found) from err
    return whole


def _twice(found: Sequence[Hadamard | ActQuant | KVQuant], where: str) -> Iterator[W4PackError]:
    """Yield a problem for each place that two records speak of."""
    seen: set[tuple[str, str, int]] = set()
    for record in found:
        kind = type(record).__name__
        order = record.order if isinstance(record, Hadamard) and record.site == "mlp_mid" else 0
        key = (kind, getattr(record, "site", ""), order)
        if key in seen:
            yield _refused(where, "one record for each site", f"two {kind} {key[1]}".rstrip())
        seen.add(key)


def _refused(where: str, expected: str, found: Any) -> Refused:
    return Refused(
        "the artifact asks for a transform or quantizer that this version of w4pack does not run",
        code="artifact-online",
        where=where,
        expected=expected,
        found=str(found)[:200],
        hint="use the version of w4pack that wrote it, or a later one",
    )


class _Reader:
    """Reads one record and collects what is wrong with it."""

    def __init__(self, record: Any, where: str) -> None:
        self.raw, self.where = record, where
        self.problems: list[W4PackError] = []

    def record(self) -> Hadamard | ActQuant | KVQuant | None:
        if not isinstance(self.raw, Mapping):
            self.wrong("", "an object", self.raw)
            return None
        kind = self.raw.get("kind")
        if not isinstance(kind, str) or kind not in KEYS:
            self.wrong(".kind", ", ".join(KEYS), kind)
            return None
        for key in self.raw:
            if key not in KEYS[kind]:
                self.wrong(f".{key}", ", ".join(KEYS[kind]), self.raw[key])
        if kind == "hadamard":
            return self.hadamard()
        return self.act_quant() if kind == "act_quant" else self.kv_quant()

    def wrong(self, key: str, expected: str, found: Any) -> None:
        text = found if isinstance(found, str) else "nothing" if found is None else shown(found)
        self.problems.append(_refused(f"{self.where}{key}", expected, text))

    def hadamard(self) -> Hadamard:
        site, order, block = self.one_of("site", HADAMARD_SITES), self.number("order"), self.number("block")
        if order % block:
            self.wrong(".block", f"a divisor of {order}", block)
        if self.raw.get("signs", "missing") is not None:
            self.wrong(".signs", "null", self.raw.get("signs"))
        return Hadamard(site, order, self.factors(block), block)

    def act_quant(self) -> ActQuant:
        if self.raw.get("symmetric") is not True:
            self.wrong(".symmetric", "true", self.raw.get("symmetric"))
        site = self.one_of("site", ACT_SITES)
        bits, clip = self.bits("bits", self.raw.get("bits")), self.clips("clip", self.raw.get("clip"))
        self.has_ratio("clip", bits, clip)
        return ActQuant(site, bits, clip)

    def kv_quant(self) -> KVQuant:
        raw_bits, raw_clips = self.pair("bits"), self.pair("clip")
        bits = (self.bits("bits.k", raw_bits[0]), self.bits("bits.v", raw_bits[1]))
        clips = (self.clips("clip.k", raw_clips[0]), self.clips("clip.v", raw_clips[1]))
        for side, own, clip in zip("kv", bits, clips, strict=True):
            self.has_ratio(f"clip.{side}", own, clip)
        if self.raw.get("guide", True) is not True:
            self.wrong(".guide", "true, or nothing", self.raw["guide"])
        return KVQuant(bits, *clips, self.number("group"), "guide" in self.raw)

    # values; each returns something of the right type, and notes a problem if it had to invent it

    def number(self, key: str) -> int:
        value = self.raw.get(key)
        if type(value) is int and value > 0:
            return value
        self.wrong(f".{key}", "a positive integer", value)
        return 1

    def one_of(self, key: str, known: Sequence[str]) -> str:
        value = self.raw.get(key)
        if isinstance(value, str) and value in known:
            return value
        self.wrong(f".{key}", ", ".join(known), value)
        return known[0]

    def bits(self, key: str, value: Any) -> int:
        if type(value) is int and value in RUN_BITS:
            return value
        self.wrong(f".{key}", "4, 8 or 16", value)
        return WIDE

    def clips(self, key: str, value: Any) -> dict[int, float]:
        table = value if isinstance(value, Mapping) else {}
        ratios = all(type(c) in (int, float) and 0 < c <= 1 for c in table.values())
        if not table or not set(table) <= set(CLIP_KEYS) or not ratios:
            self.wrong(f".{key}", 'a ratio above 0 and at most 1 for "4" or "8" bits', value)
            return {}
        return {int(bits): float(ratio) for bits, ratio in table.items()}

    def has_ratio(self, key: str, bits: int, clip: Clips) -> None:
        """Note a record without a ratio for the bits that it says itself."""
        if clip and bits != WIDE and bits not in clip:
            self.wrong(f".{key}", f'a ratio for "{bits}", the bits of the record', self.raw.get("clip"))

    def pair(self, key: str) -> tuple[Any, Any]:
        value = self.raw.get(key)
        if isinstance(value, Mapping) and set(value) == {"k", "v"}:
            return value["k"], value["v"]
        self.wrong(f".{key}", "one for `k` and one for `v`", value)
        return WIDE, {"8": 1}

    def factors(self, block: int) -> Factors:
        value = self.raw.get("factors")
        rows = value if isinstance(value, list) else []
        made, product = [], 1
        for row in rows:
            if isinstance(row, list) and len(row) == 2 and type(row[0]) is int and isinstance(row[1], str):
                made.append((row[0], row[1]))
                product *= row[0]
        if not made or len(made) != len(rows) or product != block:
            self.wrong(".factors", f"[order, construction] pairs whose orders multiply to {block}", value)
        return tuple(made)
