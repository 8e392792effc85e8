"""Whether an artifact's ``online`` records are those that it was written with, as its manifest tells.

A record that is gone or bent leaves weights that compute another model, and nothing else in a folder shows
it. Other keys of config.json are the user's to edit, so its hash alone says too little. What the manifest
tells: the transforms of the rotation, the bits in the options, and a digest of all records together
(``fingerprint``; the first artifacts have none).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from w4pack.convert.core.scheme import WIDE
from w4pack.convert.dialects.online import ACT_SITES, Hadamard, Online
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.errors import SourceError, VerifyError, W4PackError
from w4pack.convert.files.manifestform import MANIFEST, damaged

FINGERPRINT = "online"  # in the manifest's object ``quantization``


def fingerprint(records: Online) -> str:
    """Return the sha256 of records by what they say, however their JSON is written (1 or 1.0).

    Artifacts hold it: a later version must come to the same of records that it knew before.
    """
    return hashlib.sha256(json.dumps(asdict(records), sort_keys=True).encode()).hexdigest()


def changed(records: Online, manifest: Mapping[str, Any], folder: str) -> Iterator[W4PackError]:
    """Yield how records differ from what a manifest says was written; nothing where it does not tell.

    manifest  as ``manifestform.parse`` returns it, or empty

    Raises SourceError for transforms in the manifest that are none.
    """
    options = manifest.get("options", {})
    asked = options.get("quantize") or {}
    written = transforms(manifest, folder)
    told = manifest.get("quantization", {}).get(FINGERPRINT)
    if not records:
        if written or told or _ran_online(options.get("rotate"), asked):
            yield _lost(folder)
        return
    found = [*_transforms(records, written), *_quantizers(records, asked)]
    own = fingerprint(records)
    if not found and told is not None and told != own:
        found.append(("", f"records with the sha256 {told}", f"others, with {own}"))
    for site, expected, other in found:
        yield VerifyError(
            "an online record is not the one that was written: the model would compute something else",
            code="artifact-online-changed",
            where=f"{folder}/config.json: quantization_config.online" + (f": {site}" if site else ""),
            expected=f"{expected}, as w4pack.json says",
            found=other,
            hint=f"w4pack verify {folder}; take config.json as it was written",
        )


Difference = tuple[str, str, str]  # site, what was written, what is there


def transforms(manifest: Mapping[str, Any], folder: str) -> tuple[Hadamard, ...] | None:
    """Return the transforms of a manifest's rotation, None where it tells of no rotation.

    Raises SourceError for records that are no transforms.
    """
    told = manifest.get("rotation", {}).get("online")
    if told is None:
        return None
    try:
        return parse(told, "rotation").hadamard
    except W4PackError as err:
        member, expected = err.where or "rotation.online", err.expected or "transforms"
        raise damaged(f"{folder}/{MANIFEST}", member, expected, err.found or "others") from err


def _transforms(records: Online, written: tuple[Hadamard, ...] | None) -> Iterator[Difference]:
    """Yield the transforms that are not those that were ``written``; None: nothing tells."""
    if written is None:
        return
    for record in written:
        if record not in records.hadamard:
            own = [h for h in records.hadamard if h.site == record.site and h not in written]
            yield record.site, _matrix(record), _matrix(own[0]) if own else "no such record"
    sites = {record.site for record in written}
    for record in records.hadamard:
        if record.site not in sites:
            yield record.site, "no transform", _matrix(record)


def _matrix(record: Any) -> str:
    factors = " x ".join(f"{order} {construction}" for order, construction in record.factors)
    return f"order {record.order} in blocks of {record.block} = {factors}"


def _quantizers(records: Online, asked: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the quantizers that are gone, or of other bits than the options ask for."""
    act_bits, kv_bits = asked.get("act_bits", WIDE), asked.get("kv_bits", WIDE)
    for site in ACT_SITES if act_bits != WIDE else ():
        own = records.acts.get(site)
        if own is None or own.bits != act_bits:
            yield site, f"activations in {act_bits} bit", f"{own.bits} bit" if own else "no such record"
    if kv_bits != WIDE and (records.kv is None or set(records.kv.bits) != {kv_bits}):
        found = "no such record" if records.kv is None else "{} and {} bit".format(*records.kv.bits)
        yield "kv_quant", f"keys and values in {kv_bits} bit", found


def _ran_online(rotate: str | None, asked: Mapping[str, Any]) -> bool:
    """Tell whether the options of a conversion, as a manifest has them, ask for work between the layers."""
    return rotate == "full" or any(asked.get(name, WIDE) != WIDE for name in ("act_bits", "kv_bits"))


def _lost(folder: str) -> SourceError:
    """Return the error of an artifact that was made with work between its layers, and says none."""
    return SourceError(
        "config.json has lost what runs between the layers: these weights would compute another model",
        code="artifact-online",
        where=f"{folder}/config.json: quantization_config.online",
        expected="the records that w4pack.json tells of",
        found="none",
        hint=f"w4pack verify {folder}; take config.json as it was written",
    )
