"""The operators ``torch.ops.w4pack.*``: checks, then the kernel on a GPU or the reference on a CPU.

    gemm(x, weight, scales, zeros?, bias?, bits, group_size) -> y                 y = x @ ((q - z) * s) + bias
    gemm_out(x, weight, scales, zeros?, bias?, bits, group_size, out)             the same into given columns
    gather(x, perm, width) -> x[:, perm], zero columns up to width
    dequantize(weight, scales, zeros?, bits, group_size, dtype) -> (N, K)
    repack(words, perm?, bits) -> the Marlin tile of GPTQ words

They work under CUDA graphs and ``torch.compile(fullgraph=True)``, on any stream and any device index. Two
rules of use. A weight is read before the kernel in front of the product has ended (from sm_90 on): whoever
changes one in place must synchronise before it is used. Launches of one stream share a workspace, so graphs
captured on one stream must not be replayed at the same time.
Importing this module registers them, once.
"""

from typing import TYPE_CHECKING, Any

import torch

from w4pack.convert.errors import UsageError
from w4pack.kernels import checks, gather_launch, gemm_launch, launch, reference
from w4pack.kernels.arguments import Packed, current_stream, int32, pointer, register_fake, with_packed

if TYPE_CHECKING:
    from torch import Tensor

_library: Any = torch.library.Library("w4pack", "DEF")  # type: ignore[no-untyped-call]
_WEIGHT = "Tensor weight, Tensor scales, Tensor? zeros"
_library.define(f"gemm(Tensor x, {_WEIGHT}, Tensor? bias, int bits, int group_size) -> Tensor")
_library.define(
    f"gemm_out(Tensor x, {_WEIGHT}, Tensor? bias, int bits, int group_size, Tensor(a!) out) -> ()"
)
_library.define("gather(Tensor x, Tensor perm, int width) -> Tensor")
_library.define(f"dequantize({_WEIGHT}, int bits, int group_size, ScalarType dtype) -> Tensor")
_library.define("repack(Tensor words, Tensor? perm, int bits) -> Tensor")


def _check_gemm(x: "Tensor", packed: Packed, bias: "Tensor | None") -> tuple[int, int]:
    k, n = checks.weight(*packed)
    checks.activations(x, k, packed.weight)
    checks.bias(bias, x, n)
    return k, n


def _gemm_cuda(x: "Tensor", packed: Packed, bias: "Tensor | None") -> "Tensor":
    k, n = _check_gemm(x, packed, bias)
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    gemm_launch.product(x, packed, bias, out, k, n)
    return out


def _gemm_cpu(x: "Tensor", packed: Packed, bias: "Tensor | None") -> "Tensor":
    _check_gemm(x, packed, bias)
    return reference.gemm(x, *packed[:3], bias, *packed[3:])


def _gemm_fake(x: "Tensor", packed: Packed, bias: "Tensor | None") -> "Tensor":
    return x.new_empty((x.shape[0], packed.weight.shape[1] * 2 // packed.bits))


def _gemm_out_cuda(x: "Tensor", packed: Packed, bias: "Tensor | None", out: "Tensor") -> None:
    k, n = _check_gemm(x, packed, bias)
    checks.output(out, x, n)
    gemm_launch.product(x, packed, bias, out, k, n)


def _gemm_out_cpu(x: "Tensor", packed: Packed, bias: "Tensor | None", out: "Tensor") -> None:
    _, n = _check_gemm(x, packed, bias)
    checks.output(out, x, n)
    out.copy_(reference.gemm(x, *packed[:3], bias, *packed[3:]))


def _gemm_out_fake(x: "Tensor", packed: Packed, bias: "Tensor | None", out: "Tensor") -> None:
    return None


def _check_gather(x: "Tensor", perm: "Tensor", width: int) -> None:
    checks.require(x.dim() == 2, "x is not two-dimensional", "x", "(M, K)", tuple(x.shape))
    checks.order(perm, x, "x", x.shape[1])
    checks.rows(x, "x", 1)
    if x.element_size() != 2 or width % 8 or width < x.shape[1]:
        raise UsageError(
            "the width or dtype is not supported",
            expected="16-bit x, width a multiple of 8 and at least K",
            found=f"{x.dtype}, {width}",
        )


def _gather_cuda(x: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    _check_gather(x, perm, width)
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    index = x.get_device()
    with torch.cuda.device(index):
        gather_launch.run(launch.device(index), current_stream(index), x, perm, out)
    return out


def _gather_cpu(x: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    _check_gather(x, perm, width)
    checks.order_values(perm, x.shape[1])
    return reference.gather(x, perm, width)


def _gather_fake(x: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    return x.new_empty((x.shape[0], width))


def _dequantize_cuda(packed: Packed, dtype: torch.dtype) -> "Tensor":
    k, n = checks.weight(*packed)
    checks.dense_dtype(dtype)
    return gemm_launch.dequantize(packed, k, n, dtype)


def _dequantize_cpu(packed: Packed, dtype: torch.dtype) -> "Tensor":
    checks.weight(*packed)
    checks.dense_dtype(dtype)
    return reference.dequantize(*packed, dtype)


def _dequantize_fake(packed: Packed, dtype: torch.dtype) -> "Tensor":
    rows, words = packed.weight.shape
    return packed.weight.new_empty((words * 2 // packed.bits, rows * 16), dtype=dtype)


def _check_repack(words: "Tensor", perm: "Tensor | None", bits: int) -> tuple[int, int]:
    k, n = checks.gptq_words(words, bits)
    if perm is not None:
        checks.order(perm, words, "words", k)
    return k, n


def _repack_cuda(words: "Tensor", perm: "Tensor | None", bits: int) -> "Tensor":
    k, n = _check_repack(words, perm, bits)
    out = torch.empty((k // 16, n * bits // 2), dtype=torch.int32, device=words.device)
    if out.numel() == 0:
        return out
    index = words.get_device()
    with torch.cuda.device(index):
        card = launch.device(index)
        grid = min(-(-out.numel() // 256), 16 * card.multiprocessors)
        arguments = (words.data_ptr(), pointer(perm), out.data_ptr(), int32(k), int32(n))
        launch.start(card, f"repack_b{bits}", grid, 256, 0, current_stream(index), *arguments)
    return out


def _repack_cpu(words: "Tensor", perm: "Tensor | None", bits: int) -> "Tensor":
    k, _ = _check_repack(words, perm, bits)
    if perm is not None:
        checks.order_values(perm, k)
    return reference.repack(words, perm, bits)


def _repack_fake(words: "Tensor", perm: "Tensor | None", bits: int) -> "Tensor":
    return words.new_empty((words.shape[0] * 2 // bits, words.shape[1] * bits // 2))


for _name in ("gemm", "gemm_out", "gather", "dequantize", "repack"):
    for _key in ("cuda", "cpu", "fake"):
        _function = globals()[f"_{_name}_{_key}"]
        if _name.startswith("gemm"):
            _function = with_packed(_function, before=1, between=1)
        elif _name == "dequantize":
            _function = with_packed(_function, before=0, between=0)
        if _key == "fake":
            register_fake(_library, _name, _function)
        else:
            _library.impl(_name, _function, _key.upper())

gemm = torch.ops.w4pack.gemm.default
gemm_out = torch.ops.w4pack.gemm_out.default
gather = torch.ops.w4pack.gather.default
dequantize = torch.ops.w4pack.dequantize.default
repack = torch.ops.w4pack.repack.default


def prepare(index: int = 0) -> None:
    """Make a card ready, so that a later graph capture finds its workspaces."""
    launch.device(index)
