"""The operators of the quantized KV cache, in ``torch.ops.w4pack``. Pages: see ``kv_layout``.

    kv_append(k, v, codes!, params!, block_table, start, transform, clip_k, clip_v, bits, guide?) -> ()
    kv_attention(q, codes, params, block_table, lengths, first?, scale, window, softcap, transform, bits) -> y

``k`` and ``v`` are (B, kv_heads, T, head_dim), after RoPE and any norm, ``q`` (B, heads, T, head_dim), with
the strides RoPE leaves; y is (B, T, heads, head_dim), contiguous, in q's dtype. fp16 or bf16 on a card, fp32
too on a CPU. Query head h reads KV head ``h // (heads / kv_heads)``. ``transform`` is the key of R3, "" for
none: it is applied inside, in fp32, to k by the first operator and to q by the second. ``guide`` fp32
(2, kv_heads, head_dim): an offset that keys lose after R3, and the direction in which their error counts; see
``convert.quantize.activations``. Scores then lack the same number for all slots of a query, which the softmax
does not see; a soft cap does: with one, the offset must be 0.

``block_table`` int32 (B, P) holds a sequence's pages, ``start`` int32 (B,) the slot of the first new token,
``lengths`` int32 (B,) how many tokens are there, the new ones included. Slots count from 0 for each sequence
alone. So left padding takes slots, and ``first`` int32 (B,) says how many to pass over; a sequence that was
padded on the right goes on at its own length: its next ``start`` overwrites the padding. Query i of the T
stands at slot ``p = lengths - T + i`` and sees the slots j with ``first <= j <= p``, with a window also
``j > p - window`` (0: no window); a query that sees nothing gets zeros. T = 1 is decoding, T > 1 prefill or a
chunk of it; codes do not depend on how a prompt is cut. ``softcap`` c: ``c * tanh(x / c)`` (0: none).

Bits are 4 or 8. A cache in 16 bit needs none of this: R3 cancels in ``q k``, and the engine's own cache and
attention serve. Nothing waits for the card and nothing on the host depends on lengths: CUDA graphs replay.
Importing this module registers the operators, once.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from w4pack.kernels.quarot import kv_checks, kv_launch, kv_reference
from w4pack.kernels.quarot.calls import Append, Attention, register

if TYPE_CHECKING:
    from torch import Tensor

_library: Any = torch.library.Library("w4pack", "FRAGMENT")  # type: ignore[no-untyped-call]
_PAGES = "Tensor block_table, Tensor"
_library.define(
    f"kv_append(Tensor k, Tensor v, Tensor(a!) codes, Tensor(b!) params, {_PAGES} start, str transform, "
    "float clip_k, float clip_v, int bits, Tensor? guide=None) -> ()"
)
_library.define(
    f"kv_attention(Tensor q, Tensor codes, Tensor params, {_PAGES} lengths, Tensor? first, float scale, "
    "int window, float softcap, str transform, int bits) -> Tensor"
)


def _checked(check: Callable[..., None], run: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments of an operator before it runs."""

    def operator(given: Any) -> Any:
        check(given)
        return run(given)

    return operator


def _append_fake(given: Append) -> None:
    return None


def _attention_fake(given: Attention) -> "Tensor":
    rows, heads, queries, size = given.q.shape
    return given.q.new_empty((rows, queries, heads, size))


def _register(name: str, call: Any, check: Any, cuda: Any, cpu: Any, fake: Any) -> None:
    """Register an operator whose arguments are checked before either device gets them."""
    register(_library, name, call, cuda=_checked(check, cuda), cpu=_checked(check, cpu), fake=fake)


_register("kv_append", Append, kv_checks.append, kv_launch.append, kv_reference.append, _append_fake)
_register(
    "kv_attention",
    Attention,
    kv_checks.attention,
    kv_launch.attention,
    kv_reference.attention,
    _attention_fake,
)

kv_append = torch.ops.w4pack.kv_append.default
kv_attention = torch.ops.w4pack.kv_attention.default
