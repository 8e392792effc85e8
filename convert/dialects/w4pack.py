"""The artifact's own block, version 1: written here, and read back strictly.

Foreign blocks are read with tolerance; ours is not. An ``artifact_version``, layout, key or online record
that this version does not know means that the numbers may mean something else: each is a refusal that
names what was found and what is known.
"""

from collections.abc import Mapping
from typing import Any

from w4pack.convert.core.families import natural_key
from w4pack.convert.core.scheme import ONE_GROUP, QuantScheme
from w4pack.convert.dialects import Claims, ModuleClaim, TargetModel, reading
from w4pack.convert.dialects.online_reading import parse
from w4pack.convert.dialects.rules import common_scheme
from w4pack.convert.errors import Refused, W4PackError

METHODS = ("w4pack",)

ARTIFACT_VERSION = 1
LAYOUT = "marlin-16x64"
KEYS = (
    "quant_method", "artifact_version", "layout", "bits", "group_size", "sym", "act_order",
    "modules_to_not_convert", "modules", "online", "producer",
)  # fmt: skip
SIZE_KEYS = ("in_features", "out_features", "stored_in", "stored_out")
MODULE_KEYS = ("bits", "group_size", "sym", "act_order", *SIZE_KEYS)


def claims(config: Mapping[str, Any]) -> Claims:
    """Parse the block of an artifact. Never raises."""
    refusals = _refusals(config)
    default = _claim(config)
    modules = reading.table(config, "modules")
    dense = frozenset(reading.strings(config.get("modules_to_not_convert")))

    def for_module(name: str) -> ModuleClaim | None:
        if name in dense:
            return None
        return _claim(reading.table(modules, name)) if name in modules else default

    return Claims(
        method="w4pack",
        label=reading.text(config, "layout"),
        for_module=for_module,
        lm_head="lm_head" not in dense,
        refusals=refusals,
    )


def unknown(key: str, found: str, where: str) -> Refused:
    """Return the refusal of what this version does not know in an artifact's block. See ``claims``."""
    return Refused(
        f"the artifact's config says something of `{key}` that this version of w4pack does not know",
        code="artifact-unknown",
        where=where,
        expected="what the same version wrote",
        found=found,
        hint="use the version of w4pack that wrote it, or a later one",
    )


def sizes_of(config: Mapping[str, Any], module: str) -> tuple[int, int, int, int] | None:
    """Return (in_features, out_features, stored_in, stored_out) of a module; None if it is not listed."""
    modules = config.get("modules")
    if not isinstance(modules, Mapping):
        return None
    block = reading.table(modules, module)
    values = [reading.integer(block, key) for key in SIZE_KEYS]
    whole = [value for value in values if value is not None and value > 0]
    return (whole[0], whole[1], whole[2], whole[3]) if len(whole) == len(SIZE_KEYS) else None


def _claim(block: Mapping[str, Any]) -> ModuleClaim:
    return ModuleClaim(
        bits=reading.integer(block, "bits"),
        group_size=reading.group_size(block, "group_size"),
        sym=reading.boolean(block, "sym"),
        desc_act=reading.boolean(block, "act_order"),
    )


def _refusals(config: Mapping[str, Any]) -> reading.Pairs:
    version = config.get("artifact_version")
    if type(version) is not int or version != ARTIFACT_VERSION:  # 1.0 and true are equal to 1
        return (
            _pair("artifact_version", version, str(ARTIFACT_VERSION)),
        )  # other keys may mean other things
    found = []
    if config.get("layout") != LAYOUT:
        found.append(_pair("layout", config.get("layout"), LAYOUT))
    found += [_pair(str(key), config[key], ", ".join(KEYS)) for key in config if key not in KEYS]
    found += _scheme_refusals("", config)
    modules = config.get("modules", {})
    if not isinstance(modules, Mapping):
        return (*found, _pair("modules", modules, "an object"))
    for name, entry in modules.items():
        found += _module_refusals(str(name), entry)
    skipped = config.get("modules_to_not_convert", [])
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        found.append(_pair("modules_to_not_convert", skipped, "a list of names"))
    return (*found, *_online_refusals(config.get("online", [])))


def _module_refusals(name: str, entry: Any) -> list[tuple[str, str]]:
    where = f"modules.{name}"
    if not isinstance(entry, Mapping):
        return [_pair(where, entry, "an object")]
    found = [
        _pair(f"{where}.{key}", entry[key], ", ".join(MODULE_KEYS)) for key in entry if key not in MODULE_KEYS
    ]
    found += _scheme_refusals(where + ".", entry)
    for key in SIZE_KEYS:
        value = entry.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found.append(_pair(f"{where}.{key}", value, "a positive integer"))
    return found


def _scheme_refusals(where: str, block: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    bits = block.get("bits")
    if type(bits) is not int or bits not in reading.READ_BITS:  # 4.0 is equal to 4
        found.append(_pair(where + "bits", bits, "4 or 8"))
    group = block.get("group_size")
    if not isinstance(group, int) or isinstance(group, bool) or (group < 1 and group != ONE_GROUP):
        found.append(_pair(where + "group_size", group, "-1 or a positive integer"))
    for key in ("sym", "act_order"):
        if not isinstance(block.get(key), bool):
            found.append(_pair(where + key, block.get(key), "true or false"))
    return found


def _online_refusals(online: Any) -> list[tuple[str, str]]:
    """Refuse records that nobody here knows: each changes the forward pass."""
    try:
        parse(online, "")
    except W4PackError as err:
        problems = err.problems or (err,)
        return [((p.where or "").lstrip("."), f"{p.found} (known: {p.expected})") for p in problems]
    return []


def run_time(config: Mapping[str, Any]) -> reading.Pairs:
    """Return (key, text) of what runs at run time: for those who run nothing, each is a refusal. Records must
    have passed ``claims``."""
    records = config.get("online", [])
    return tuple(
        (f"online.{number}", f"{record['kind']}: runs in w4pack's own loader only")
        for number, record in enumerate(records if isinstance(records, list) else [])
        if isinstance(record, Mapping) and "kind" in record
    )


def _pair(key: str, value: Any, known: str) -> tuple[str, str]:
    return key, f"{reading.shown(value)} (known: {known})"


# ---- writing -------------------------------------------------------------------------------------


def write(model: TargetModel) -> dict[str, Any]:
    """Return the artifact's block; ``modules`` lists what differs from the defaults, padding included."""
    base = common_scheme(model.layers)
    default = (base.bits, base.group_size, base.sym, False)
    modules = {}
    for name in sorted(model.layers, key=natural_key):
        scheme = model.layers[name]
        stored = model.stored.get(name, (scheme.in_features, scheme.out_features))
        padded = stored != (scheme.in_features, scheme.out_features)
        if padded or (scheme.bits, scheme.group_size, scheme.sym, scheme.act_order) != default:
            modules[name] = _entry(scheme, stored)
    return {
        "quant_method": "w4pack",
        "artifact_version": ARTIFACT_VERSION,
        "layout": LAYOUT,
        "bits": base.bits,
        "group_size": base.group_size,
        "sym": base.sym,
        "act_order": False,
        "modules_to_not_convert": sorted(set(model.dense_linears), key=natural_key),
        "modules": modules,
        "online": [],
        "producer": {"name": "w4pack", "version": model.version},
    }


def _entry(scheme: QuantScheme, stored: tuple[int, int]) -> dict[str, Any]:
    values = (
        scheme.bits,
        scheme.group_size,
        scheme.sym,
        scheme.act_order,
        scheme.in_features,
        scheme.out_features,
    )
    return dict(zip(MODULE_KEYS, (*values, *stored), strict=True))
