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

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from w4pack.convert.errors import UsageError
from w4pack.kernels import checks, gather_launch, launch, reference, tiles

if TYPE_CHECKING:
    from torch import Tensor

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_int = ctypes.c_int32


def _no_stream(index: int) -> int:
    """Stand in on a build of torch without CUDA, where nothing is ever launched."""
    raise RuntimeError(f"no CUDA stream on device {index}")


# The raw handle costs 0.1 us, a Stream object 4.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)

_library: Any = torch.library.Library("w4pack", "DEF")  # type: ignore[no-untyped-call]
_WEIGHT = "Tensor weight, Tensor scales, Tensor? zeros"
_library.define(f"gemm(Tensor x, {_WEIGHT}, Tensor? bias, int bits, int group_size) -> Tensor")
_library.define(
    f"gemm_out(Tensor x, {_WEIGHT}, Tensor? bias, int bits, int group_size, Tensor(a!) out) -> ()"
)
_library.define("gather(Tensor x, Tensor perm, int width) -> Tensor")
_library.define(f"dequantize({_WEIGHT}, int bits, int group_size, ScalarType dtype) -> Tensor")
_library.define("repack(Tensor words, Tensor? perm, int bits) -> Tensor")


def _pointer(tensor: "Tensor | None") -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _check_gemm(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group: int,
) -> tuple[int, int]:
    k, n = checks.weight(weight, scales, zeros, bits, group)
    checks.activations(x, k, weight)
    checks.bias(bias, x, n)
    return k, n


def _gemm_cuda(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group_size: int,
) -> "Tensor":
    k, n = _check_gemm(x, weight, scales, zeros, bias, bits, group_size)
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    _product(x, weight, scales, zeros, bias, bits, group_size, out, k, n)
    return out


def _gemm_out_cuda(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group_size: int,
    out: "Tensor",
) -> None:
    k, n = _check_gemm(x, weight, scales, zeros, bias, bits, group_size)
    checks.output(out, x, n)
    _product(x, weight, scales, zeros, bias, bits, group_size, out, k, n)


def _product(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group_size: int,
    out: "Tensor",
    k: int,
    n: int,
) -> None:
    """Run the kernel, or from the table's M on dequantize once and let the library multiply."""
    card = launch.device(x.get_device())
    if x.shape[0] < tiles.dense_from(launch.table_arch(card.arch)):
        run_gemm(x, weight, scales, zeros, bias, bits, group_size, out, k, n)
        return
    dense = _dequantize_cuda(weight, scales, zeros, bits, group_size, x.dtype).t()
    if bias is None:
        torch.mm(x, dense, out=out)
    else:
        torch.addmm(bias, x, dense, out=out)


def run_gemm(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group_size: int,
    out: "Tensor",
    k: int,
    n: int,
    chosen: tiles.Launch | None = None,
) -> None:
    """Launch a product whose arguments were checked; ``chosen`` overrides the table, for tuning."""
    m = x.shape[0]
    if m == 0:
        return
    index = x.get_device()
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            run_gemm(x, weight, scales, zeros, bias, bits, group_size, out, k, n, chosen)
        return
    card = launch.device(index)
    choice = chosen or tiles.choose(launch.table_arch(card.arch), card.multiprocessors, m, n, k, bits)
    tile = choice.tile
    stream = _current_stream(index)
    space = card.workspace(stream)
    row = x.stride(0) if m > 1 else k
    launch.start(
        card,
        _entry(tile, x.dtype, bits, zeros is not None),
        choice.grid,
        tile.threads,
        tile.shared_bytes(bits, zeros is not None),
        stream,
        launch.box_map(card, x.data_ptr(), m, k, row, tile.tokens) if tile.producer else x.data_ptr(),
        weight.data_ptr(),
        scales.data_ptr(),
        _pointer(zeros),
        _pointer(bias),
        out.data_ptr(),
        space.sums,
        space.flags,
        _int(m),
        _int(n),
        _int(k),
        _int(row),
        _int(out.stride(0) if m > 1 else n),
        _int(tiles.group_shift(group_size)),
        _int(scales.dtype == torch.bfloat16),
    )


_entries: dict[tuple[tiles.Tile, torch.dtype, int, bool], str] = {}


def _entry(tile: tiles.Tile, dtype: torch.dtype, bits: int, zeros: bool) -> str:
    key = (tile, dtype, bits, zeros)
    found = _entries.get(key)
    if found is None:
        found = _entries[key] = tiles.kernel_name(tile, NAMES[dtype], bits, zeros)
    return found


def _gather_cuda(x: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    _check_gather(x, perm, width)
    out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    index = x.get_device()
    with torch.cuda.device(index):
        gather_launch.run(launch.device(index), _current_stream(index), x, perm, out)
    return out


def _check_gather(x: "Tensor", perm: "Tensor", width: int) -> None:
    checks.order(perm, x, "x", x.shape[1])
    checks.rows(x, "x", 1)
    if x.element_size() != 2 or width % 8 or width < x.shape[1]:
        raise UsageError(
            "the width or dtype is not supported",
            expected="16-bit x, width a multiple of 8 and at least K",
            found=f"{x.dtype}, {width}",
        )


def _dequantize_cuda(
    weight: "Tensor", scales: "Tensor", zeros: "Tensor | None", bits: int, group_size: int, dtype: torch.dtype
) -> "Tensor":
    k, n = checks.weight(weight, scales, zeros, bits, group_size)
    checks.dense_dtype(dtype)
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    index = weight.get_device()
    with torch.cuda.device(index):
        launch.start(
            launch.device(index),
            f"dequantize_{NAMES[dtype]}_b{bits}_{'sym' if zeros is None else 'zp'}",
            (n // 64, -(-k // 128)),
            256,
            0,
            _current_stream(index),
            weight.data_ptr(),
            scales.data_ptr(),
            _pointer(zeros),
            out.data_ptr(),
            _int(n),
            _int(k),
            _int(tiles.group_shift(group_size)),
            _int(scales.dtype == torch.bfloat16),
        )
    return out


def _repack_cuda(words: "Tensor", perm: "Tensor | None", bits: int) -> "Tensor":
    k, n = checks.gptq_words(words, bits)
    if perm is not None:
        checks.order(perm, words, "words", k)
    out = torch.empty((k // 16, n * bits // 2), dtype=torch.int32, device=words.device)
    index = words.get_device()
    with torch.cuda.device(index):
        card = launch.device(index)
        grid = min(-(-out.numel() // 256), 16 * card.multiprocessors)
        arguments = (words.data_ptr(), _pointer(perm), out.data_ptr(), _int(k), _int(n))
        launch.start(card, f"repack_b{bits}", grid, 256, 0, _current_stream(index), *arguments)
    return out


def _gemm_cpu(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group_size: int,
) -> "Tensor":
    _check_gemm(x, weight, scales, zeros, bias, bits, group_size)
    return reference.gemm(x, weight, scales, zeros, bias, bits, group_size)


def _gemm_out_cpu(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group_size: int,
    out: "Tensor",
) -> None:
    _, n = _check_gemm(x, weight, scales, zeros, bias, bits, group_size)
    checks.output(out, x, n)
    out.copy_(reference.gemm(x, weight, scales, zeros, bias, bits, group_size))


def _gather_cpu(x: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    _check_gather(x, perm, width)
    checks.order_values(perm, x.shape[1])
    return reference.gather(x, perm, width)


def _dequantize_cpu(
    weight: "Tensor", scales: "Tensor", zeros: "Tensor | None", bits: int, group_size: int, dtype: torch.dtype
) -> "Tensor":
    checks.weight(weight, scales, zeros, bits, group_size)
    return reference.dequantize(weight, scales, zeros, bits, group_size, dtype)


def _repack_cpu(words: "Tensor", perm: "Tensor | None", bits: int) -> "Tensor":
    k, _ = checks.gptq_words(words, bits)
    if perm is not None:
        checks.order(perm, words, "words", k)
        checks.order_values(perm, k)
    return reference.repack(words, perm, bits)


def _gemm_fake(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group_size: int,
) -> "Tensor":
    return x.new_empty((x.shape[0], weight.shape[1] * 2 // bits))


def _gemm_out_fake(
    x: "Tensor",
    weight: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    bias: "Tensor | None",
    bits: int,
    group_size: int,
    out: "Tensor",
) -> None:
    return None


def _gather_fake(x: "Tensor", perm: "Tensor", width: int) -> "Tensor":
    return x.new_empty((x.shape[0], width))


def _dequantize_fake(
    weight: "Tensor", scales: "Tensor", zeros: "Tensor | None", bits: int, group_size: int, dtype: torch.dtype
) -> "Tensor":
    return weight.new_empty((weight.shape[1] * 2 // bits, weight.shape[0] * 16), dtype=dtype)


def _repack_fake(words: "Tensor", perm: "Tensor | None", bits: int) -> "Tensor":
    return words.new_empty((words.shape[0] * 2 // bits, words.shape[1] * bits // 2))


for _name in ("gemm", "gemm_out", "gather", "dequantize", "repack"):
    _library.impl(_name, globals()[f"_{_name}_cuda"], "CUDA")
    _library.impl(_name, globals()[f"_{_name}_cpu"], "CPU")
    torch.library.register_fake(f"w4pack::{_name}", globals()[f"_{_name}_fake"], lib=_library)

gemm = torch.ops.w4pack.gemm.default
gemm_out = torch.ops.w4pack.gemm_out.default
gather = torch.ops.w4pack.gather.default
dequantize = torch.ops.w4pack.dequantize.default
repack = torch.ops.w4pack.repack.default


def prepare(index: int = 0) -> None:
    """Make a card ready, so that a later graph capture finds its workspaces."""
    launch.device(index)
