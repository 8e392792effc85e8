"""Which of vLLM's kernels takes a module, and each kernel's reason if it does not.

They are tried in this order: Machete (sm_90 only), Marlin, Conch (its package must be installed: not counted
here), Exllama, Triton. Experts have their own: Marlin's, else a Triton kernel that halves groups.
"""

from w4pack.convert.engines import checks
from w4pack.convert.engines.checks import Hit
from w4pack.convert.engines.model import Kind, Model


def marlin_reason(model: Model, kind: Kind, tp: int) -> str | None:
    """Why Marlin does not take a compressed-tensors module; None if it does."""
    if not kind.layer.sym and kind.layer.bits == 8:
        return "Marlin: no 8 bit with zero points"
    if kind.group not in checks.MARLIN_GROUPS:
        return f"Marlin: group {kind.group} is not -1, 32, 64 or 128"
    return None


def machete_reason(model: Model, kind: Kind, tp: int) -> str | None:
    """Why Machete (sm_90 only) does not take a module; None if it does."""
    k, n = model.per_rank(kind, tp)
    if kind.group not in (-1, 64, 128):
        return f"Machete: group {kind.group} is not -1, 64 or 128"
    if k % 64:
        return f"Machete: K % 64 = {checks.count(k % 64)}"
    return f"Machete: N % 128 = {checks.count(n % 128)}" if n % 128 else None


def exllama_reason(model: Model, kind: Kind, tp: int) -> str | None:
    """Why Exllama does not take a module; None if it does."""
    k, n = model.per_rank(kind, tp)
    if not kind.layer.sym:
        return "Exllama: no zero points"
    if (model.dtype or kind.layer.scale_dtype) != "F16":
        return "Exllama: float16 only"
    if kind.group <= 0 or k % kind.group:
        return f"Exllama: K % {kind.group} = {checks.count(k % kind.group)}"
    pack = checks.pack_factor(kind)
    return f"Exllama: N % {pack} = {checks.count(n % pack)}" if n % pack else None


def triton_reason(model: Model, kind: Kind, tp: int) -> str | None:
    """Why the Triton kernel does not take a module; None if it does."""
    k, n = model.per_rank(kind, tp)
    if kind.layer.bits != 4:
        return "Triton: 4 bit only"
    if kind.group not in (32, 64, 128) and kind.group != k:
        return f"Triton: group {kind.group} is not 32, 64, 128 or K"
    if kind.group > 0 and k % kind.group:
        return f"Triton: K % {kind.group} = {checks.count(k % kind.group)}"
    return f"Triton: N % 8 = {checks.count(n % 8)}" if n % 8 else None


def no_kernel(model: Model, kind: Kind, tp: int) -> Hit:
    """Compressed-tensors modules that no kernel takes, with each kernel's reason."""
    reasons = _reasons(model, kind, tp)
    return ("a kernel that takes the module", "; ".join(reasons)) if len(reasons) == 4 else None


def slow_kernel(model: Model, kind: Kind, tp: int) -> Hit:
    """Compressed-tensors modules that Marlin does not take, but another kernel does."""
    if marlin_reason(model, kind, tp) is None:
        return None
    reasons = _reasons(model, kind, tp)
    if len(reasons) == 4:
        return None
    if machete_reason(model, kind, tp) is None:
        return "a kernel on every GPU", f"Machete only, on sm_90 ({'; '.join(reasons)})"
    return "Machete or Marlin", f"a slower kernel ({'; '.join(reasons)})"


def _reasons(model: Model, kind: Kind, tp: int) -> list[str]:
    if kind.layer.layout != "compressed-tensors" or kind.expert:
        return []
    asked = (machete_reason, marlin_reason, exllama_reason, triton_reason)
    return [reason for test in asked if (reason := test(model, kind, tp)) is not None]


def expert_shape(model: Model, kind: Kind, tp: int) -> tuple[int, int]:
    """(hidden size, intermediate size on one rank) of an expert module, the latter rounded down."""
    k, n = kind.layer.in_features, kind.layer.out_features
    return (n, k // tp) if kind.role == "row" else (k, n // tp)


def halved_group(model: Model, kind: Kind, tp: int) -> int | None:
    """Group size after the fallback's halving, at least 32; None if it finds none."""
    hidden, inner = expert_shape(model, kind, tp)
    group = kind.group
    if group <= 0:
        return group
    while group >= 32 and (inner % group or hidden % group):
        group //= 2
    return group if group >= 32 else None


def moe_marlin(model: Model, kind: Kind, tp: int) -> str | None:
    """Why Marlin's expert kernel does not take a module; None if it does."""
    hidden, inner = expert_shape(model, kind, tp)
    if hidden % 128:
        return f"hidden % 128 = {hidden % 128}"
    if kind.group not in checks.MARLIN_GROUPS:
        return f"group {kind.group}"
    return f"I/{tp} % {kind.group} = {inner % kind.group}" if kind.group > 0 and inner % kind.group else None
