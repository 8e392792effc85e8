"""The config beside what was found: the tensors win; a contradiction becomes a warning or a refusal."""

from collections.abc import Iterable, Mapping
from typing import Any

from w4pack.convert import dialects
from w4pack.convert.core.scheme import ONE_GROUP
from w4pack.convert.dialects import Claims, ModuleClaim
from w4pack.convert.dialects.others import other_method
from w4pack.convert.dialects.w4pack import unknown
from w4pack.convert.errors import FROM_16_BIT, Refused, SourceError, W4PackError
from w4pack.convert.files.tensorfile import TensorInfo
from w4pack.convert.formats import Match
from w4pack.convert.source.orders import ORDER_SUFFIXES, Order
from w4pack.convert.source.reading import DetectOptions, Reading

# Layouts that files of a method may have, and the one that an AWQ version names.
LABELLED = {
    "gptq": ("gptq", "marlin-legacy"),
    "awq": ("awq", "awq-gemv", "awq-gemv-fast", "awq-marlin"),
    "auto-round": ("gptq", "awq", "compressed-tensors"),
    "compressed-tensors": ("compressed-tensors",),
    "w4pack": ("marlin",),
}
AWQ_LABELS = {"gemm": "awq", "gemv": "awq-gemv", "gemv_fast": "awq-gemv-fast", "llm_awq": "awq-gemv-fast"}


def compare_bits(name: str, match: Match, claim: ModuleClaim, read: Reading) -> None:
    """Compare the width of the codes with the config, and whether the layer is quantized at all."""
    if claim.bits is not None and claim.bits != match.bits:
        read.notes.warn("bits", name, f"{claim.bits} bit, by the config", f"{match.bits} bit, by the tensors")
    if read.claims is not None and read.claims.for_module(name) is None:
        read.notes.warn("skipped-but-quantized", name, "not quantized, by the config", "quantized tensors")


def compare_label(name: str, layout: str, read: Reading) -> None:
    """Compare the layout with what the config calls it. Old files have no label: none is no contradiction."""
    if read.claims is None:
        return
    wanted = LABELLED.get(read.claims.method, ())
    label = (read.claims.label or "").lower().replace("-", "_")
    exact = AWQ_LABELS.get(label) if read.claims.method == "awq" else None
    if (wanted and layout not in wanted) or (exact is not None and layout != exact):
        said = f"{read.claims.method} {read.claims.label or ''}".strip()
        read.notes.warn("layout-label", name, f"{said}, by the config", f"{layout}, by the tensors")


def compare_order(
    name: str, order: Order, claim: ModuleClaim, local: Mapping[str, TensorInfo], layout: str, read: Reading
) -> None:
    """Compare the map with ``desc_act``; refuse a map that is announced and missing."""
    has_map = any(s in local for s in ORDER_SUFFIXES) or "act_perm" in local
    if (
        claim.desc_act
        and not has_map
        and layout == "gptq"
        and claim.group_size != ONE_GROUP
        and (read.claims is None or read.claims.writes_g_idx)
    ):
        if read.claims is not None and -(-order_rows(local) // max(claim.group_size or 1, 1)) == 1:
            return
        raise SourceError(
            "the order of the input rows is missing",
            code="g-idx-missing",
            where=f"{name}.g_idx",
            expected="a `g_idx` tensor, as `desc_act` is true",
            found="none",
        )
    if claim.desc_act and has_map and not order.is_real and layout != "marlin":
        read.notes.warn(
            "order-flag",
            name,
            "act-order, as `desc_act` is true",
            "rows in natural order; the label is dropped",
        )
    if claim.desc_act is False and order.is_real:
        read.notes.warn(
            "order-flag-false",
            name,
            "natural order, as `desc_act` is false",
            "a real permutation in g_idx; kept. vLLM and SGLang drop it without a word",
        )


def order_rows(local: Mapping[str, TensorInfo]) -> int:
    """Rows of K that a GPTQ ``qweight`` can hold at 4 bit."""
    return local["qweight"].shape[0] * 8 if "qweight" in local else 0


def config_problems(
    claims: Claims | None, options: DetectOptions, quant_file: str | None
) -> Iterable[W4PackError]:
    """Refuse a method and keys that change what the model computes, but for those the user lets pass."""
    if claims is None:
        return
    if claims.unsupported:
        yield Refused(claims.unsupported, code="method-unknown", where=quant_file, hint=FROM_16_BIT)
    if claims.method == "w4pack":
        yield from _unknown_artifact(claims, quant_file)
        return
    for key, value in claims.refusals:
        if any(lets_pass(asked, key) for asked in options.ignore_keys):
            continue
        yield Refused(
            f"the config says `{key}`, which changes what the model computes",
            code="forward-changing",
            where=f"{quant_file}: {key}",
            expected="absent or empty",
            found=value,
            hint=f"`--ignore-key {key}` converts the stored weights as they are; "
            "the result is another model unless the key has no effect",
        )


def lets_pass(asked: str, key: str) -> bool:
    """Tell whether ``--ignore-key asked`` means ``key``: its full path, or its last part."""
    return asked in (key, key.rpartition(".")[2])


def _unknown_artifact(claims: Claims, quant_file: str | None) -> Iterable[W4PackError]:
    """Refuse what this version does not know of an artifact: its numbers may mean something else."""
    for key, value in claims.refusals:
        yield unknown(key, value, f"{quant_file}: {key}")


def unknown_method(quant_config: Mapping[str, Any], quant_file: str | None) -> W4PackError:
    """Describe a quantization config of no known dialect."""
    return Refused(
        "the checkpoint is quantized with a method that w4pack does not read",
        code="method-unknown",
        where=f"{quant_file}: quant_method",
        expected=", ".join(dialects.DIALECTS),
        found=f"{quant_config.get('quant_method')} ({other_method(quant_config) or 'no method'})",
        hint=FROM_16_BIT,
    )
