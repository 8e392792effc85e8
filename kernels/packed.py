"""Which modules of an artifact are packed, what each of them is, and whether its tensors are as they must be.

Works on headers: config.json says a module's scheme, the tensors' shapes must follow from it exactly.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from w4pack.convert.dialects import Claims
from w4pack.convert.dialects import w4pack as dialect
from w4pack.convert.errors import Refused, SourceError, W4PackError
from w4pack.convert.files.tensorfile import TensorInfo, natural_order
from w4pack.kernels.spec import GROUP_SIZES, UNIT, LinearSpec


def packed_modules(
    tensors: Mapping[str, TensorInfo], quant: Mapping[str, Any]
) -> dict[str, dict[str, TensorInfo]]:
    """Return module -> suffix -> tensor for every module that the config or the tensors call packed."""
    modules = dict.fromkeys(quant.get("modules", {}))
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        is_words = suffix == "weight" and info.dtype == "I32" and len(info.shape) == 2
        if is_words or suffix in ("weight_scale", "weight_zero_point", "act_perm"):
            modules[module] = None
    found: dict[str, dict[str, TensorInfo]] = {name: {} for name in sorted(modules, key=natural_order)}
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        if module in found:
            found[module][suffix] = info
    return found


def spec_of(
    module: str, found: Mapping[str, TensorInfo], quant: Mapping[str, Any], claims: Claims
) -> LinearSpec | W4PackError:
    """Return what the config, and for an unlisted module the weight's shape, say of a module."""
    claim = claims.for_module(module)
    if claim is None:
        names = ", ".join(found)
        return tensor_error("a layer that is said to be left in 16 bit is packed", module, "none", names)
    bits, group = claim.bits or 0, claim.group_size or 0
    if group not in GROUP_SIZES:
        known = ", ".join(map(str, GROUP_SIZES))
        return Refused(
            "no kernel for this group size", code="group-size", where=module, expected=known, found=str(group)
        )
    sizes = dialect.sizes_of(quant, module) or _sizes(found.get("weight"), bits)
    if sizes is None:
        return tensor_error(
            "a packed layer has no usable weight",
            f"{module}.weight",
            "int32, (K/16, N * bits / 2)",
            shown(found.get("weight")),
        )
    k, n, stored_k, stored_n = sizes
    if (stored_k, stored_n) != (-(-k // UNIT) * UNIT, -(-n // UNIT) * UNIT):
        rounded = f"{-(-k // UNIT) * UNIT} x {-(-n // UNIT) * UNIT}: {k} x {n}, each rounded up to {UNIT}"
        return tensor_error(
            "the stored size of a layer does not fit its own", module, rounded, f"{stored_k} x {stored_n}"
        )
    return LinearSpec(
        k, n, bits, group, bool(claim.sym), bool(claim.desc_act), "bias" in found, stored_k, stored_n
    )


def _sizes(weight: TensorInfo | None, bits: int) -> tuple[int, int, int, int] | None:
    """Sizes of a module that the config does not list: nothing of it is padded."""
    if weight is None or len(weight.shape) != 2 or bits not in (4, 8):
        return None
    k, n = 16 * weight.shape[0], 2 * weight.shape[1] // bits
    return (k, n, k, n) if k and n and n * bits == 2 * weight.shape[1] else None


def compare(module: str, spec: LinearSpec, found: Mapping[str, TensorInfo]) -> Iterator[SourceError]:
    """Compare the tensors of a packed module with its spec."""
    dtypes = spec.dtypes()
    for suffix, shape in spec.shapes().items():
        name, wanted = f"{module}.{suffix}", f"{' or '.join(dtypes[suffix])} {list(shape)}"
        info = found.get(suffix)
        if info is None:
            yield tensor_error("a tensor of a packed layer is missing", name, wanted, None, "missing-tensor")
        elif info.shape != shape:
            yield tensor_error("a tensor of a packed layer has the wrong shape", name, wanted, shown(info))
        elif info.dtype not in dtypes[suffix]:
            yield tensor_error("a tensor of a packed layer has the wrong dtype", name, wanted, shown(info))
    for suffix, info in found.items():
        if suffix not in dtypes:
            wanted = ", ".join(dtypes)
            yield tensor_error(
                "a packed layer has a tensor too many", info.name, wanted, shown(info), "extra-tensor"
            )


def tensor_error(
    what: str, where: str, expected: str, found: str | None, code: str = "tensor-mismatch"
) -> SourceError:
    """Return the error for a tensor or module that is not what it must be."""
    return SourceError(what, code=code, where=where, expected=expected, found=found)


def shown(info: TensorInfo | None) -> str:
    """Return dtype and shape as messages give them."""
    return "no such tensor" if info is None else f"{info.dtype} {list(info.shape)}"
