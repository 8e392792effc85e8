"""``w4pack bench``: how close to the card's floor one's own shapes run, and beside the library's product.

Imports nothing heavy when loaded, so that a missing extra is said in words.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from w4pack.convert.console import Given, print_json, question_reporter
from w4pack.convert.core.scheme import WIDE
from w4pack.convert.errors import UsageError, W4PackError, require_extra
from w4pack.convert.events import SCHEMA

if TYPE_CHECKING:
    import torch

    from w4pack.kernels.bench.products import Point
    from w4pack.kernels.bench.rates import Rates
    from w4pack.kernels.bench.shapes import Shape

DEFAULT_BITS, DEFAULT_GROUP, DEFAULT_DTYPE = 4, 128, "float16"
MOST_ROWS = 65536  # of activations
REPEATS = 5
TAGS = {"float16": "F16", "bfloat16": "BF16"}
OF_SHAPES = ("bits", "group_size")  # what an artifact says itself
HEAD = f"  {'M':>5}  {'of the floor':>12}  {'time':>10}  {'speed-up':>8}  {'torch.mm':>10}  {'error':>7}"


def run_bench(given: Given) -> None:
    """Time every shape at every M, and print each as soon as it is known.

    Raises:
        UsageError: options that make no sense, an extra that is missing, no card that runs the kernels.
        SourceError, Refused: a path that is no artifact, or a broken one.
        W4PackError: a wrong result, or a card without memory for a shape.
    """
    _check_options(given)
    require_extra("timing the kernels", ("torch", "transformers"), "gpu")
    dtype, shapes = _shapes(given)
    from w4pack.kernels.bench import cards

    device = cards.find()
    rates = _rates(device, dtype, integers=any(shape.act_bits != WIDE for shape in shapes))
    if not given["as_json"]:
        print("\n".join(_ceilings(device, rates)), flush=True)
    _note_experts(given, shapes)
    found = [(shape, _points(given, shape, dtype, device, rates)) for shape in shapes]
    if given["as_json"]:
        print_json(_record(device, dtype, rates, found))


# ---- what is asked ---------------------------------------------------------------------------------


def _check_options(given: Given) -> None:
    if bool(given["path"]) == bool(given["shape"]):
        raise UsageError(
            "give an artifact or shapes, one of the two",
            expected="PATH, or --shape NxK",
            found="both" if given["path"] else "neither",
        )
    for name in OF_SHAPES:
        if given["path"] and given[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError("the artifact says this itself", where=option, hint=f"leave out {option}")
    if given["dtype"] == "float32":
        raise UsageError(
            "the kernels do not compute in this dtype",
            code="dtype",
            where="--dtype",
            expected="float16 or bfloat16",
            found="float32",
        )
    for m in given["m"]:
        if not 1 <= m <= MOST_ROWS:
            raise UsageError(
                "no number of rows", where="--m", expected=f"1 to {MOST_ROWS}, e.g. 1,16,64", found=str(m)
            )


def _shapes(given: Given) -> tuple["torch.dtype", "list[Shape]"]:
    """Return the dtype of activations and what is timed."""
    import torch

    from w4pack.kernels.bench import shapes

    if not given["path"]:
        name = given["dtype"] or DEFAULT_DTYPE
        bits = DEFAULT_BITS if given["bits"] is None else int(given["bits"])
        group = DEFAULT_GROUP if given["group_size"] is None else int(given["group_size"])
        texts, act_bits = dict.fromkeys(given["shape"]), given["act_bits"] or WIDE
        made = [shapes.of_text(text, bits, group, TAGS[name], act_bits) for text in texts]
        return getattr(torch, name), made
    artifact, found = shapes.open_shapes(Path(given["path"]), given["act_bits"])
    own = artifact.config.get("dtype", artifact.config.get("torch_dtype"))
    name = given["dtype"] or (
        own if own in TAGS else "bfloat16"
    )  # as the loader: fp32 models run in bfloat16
    return getattr(torch, name), found


# ---- measuring -------------------------------------------------------------------------------------


def _rates(device: "torch.device", dtype: "torch.dtype", *, integers: bool) -> "Rates":
    from w4pack.kernels.bench.rates import measure

    rates = measure(device, dtype, integers=integers)
    _give_back(device)
    return rates


def _points(
    given: Given, shape: "Shape", dtype: "torch.dtype", device: "torch.device", rates: "Rates"
) -> "list[Point]":
    """Time one shape at every M; print each unless JSON is wanted."""
    import torch

    if not given["as_json"]:
        print("\n".join(["", *_title(shape), HEAD]), flush=True)
    try:
        return _timed(given, shape, dtype, device, rates)
    except torch.OutOfMemoryError as err:
        raise W4PackError(
            "the card has too little free memory for a shape",
            code="out-of-memory",
            where=_title(shape)[0],
            found=str(err).strip().partition("\n")[0][:200],
            hint="a smaller --m or --shape, or end what else uses the card",
        ) from err
    finally:
        _give_back(device)


def _timed(
    given: Given, shape: "Shape", dtype: "torch.dtype", device: "torch.device", rates: "Rates"
) -> "list[Point]":
    from w4pack.kernels.bench.products import Weights, point, warm

    weights, points = Weights(shape, dtype, device), []
    if device.type == "cuda":
        warm(weights)
    for m in dict.fromkeys(given["m"]):
        points.append(point(weights, m, rates, REPEATS))
        if not given["as_json"]:
            print(_row(points[-1]), flush=True)
    return points


def _give_back(device: "torch.device") -> None:
    """Give freed memory back to the card, so that the next shape finds it in one piece."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()


def _note_experts(given: Given, shapes: "list[Shape]") -> None:
    if any(shape.experts for shape in shapes):
        text = "experts are timed one by one; a model multiplies those of a layer in one grouped product"
        question_reporter(given).event("note", text=text)


# ---- telling ---------------------------------------------------------------------------------------


def _name(device: "torch.device") -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _ceilings(device: "torch.device", rates: "Rates") -> list[str]:
    """Return the lines that say what the floor is made of."""
    return [
        f"card      {_name(device)}",
        f"reads     {rates.read / 1e12:.2f} TB/s ({rates.read_by})",
        f"computes  {rates.operations / 1e12:.0f} TFLOP/s ({rates.operations_by})",
        *([f"integers  {rates.integers / 1e12:.0f} TOP/s ({rates.integers_by})"] if rates.integers else []),
        "floor     the larger of bytes / reads and operations / computes; rates measured just now",
    ]


def _title(shape: "Shape") -> list[str]:
    """Return the lines over a shape's rows: what it is, which layers have it."""
    spec = shape.spec
    group = "one group" if spec.group_size == -1 else f"g{spec.group_size}"
    more = ("" if spec.sym else ", zero points") + (", act-order" if spec.act_order else "")
    more += "" if shape.act_bits == WIDE else f", {shape.act_bits}-bit activations"
    layers = [f"  {name} x {count}" for name, count in shape.layers]
    return [f"{spec.n}x{spec.k}, {spec.bits} bit, {group}{more}", *layers]


def _row(point: "Point") -> str:
    ours, library = point.seconds * 1e6, point.library_seconds * 1e6
    return (
        f"  {point.m:>5}  {100 * point.share:>11.0f}%  {ours:>7.1f} us  {point.speed_up:>7.2f}x"
        f"  {library:>7.1f} us  {point.error:>7.1e}"
    )


def _record(
    device: "torch.device",
    dtype: "torch.dtype",
    rates: "Rates",
    found: "list[tuple[Shape, list[Point]]]",
) -> dict[str, Any]:
    import torch

    return {
        "schema": SCHEMA,
        "card": _name(device),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "read_bytes_per_second": rates.read,
        "read_by": rates.read_by,
        "operations_per_second": rates.operations,
        "operations_by": rates.operations_by,
        "integers_per_second": rates.integers or None,
        "integers_by": rates.integers_by or None,
        "shapes": [_shape_record(shape, points) for shape, points in found],
    }


def _shape_record(shape: "Shape", points: "list[Point]") -> dict[str, Any]:
    spec = shape.spec
    return {
        "out_features": spec.n,
        "in_features": spec.k,
        "bits": spec.bits,
        "group_size": spec.group_size,
        "sym": spec.sym,
        "act_bits": shape.act_bits,
        "act_order": spec.act_order,
        "layers": [{"name": name, "count": count} for name, count in shape.layers],
        "points": [
            {
                "m": point.m,
                "share_of_floor": point.share,
                "floor_seconds": point.floor,
                "bound": point.bound,
                "seconds": point.seconds,
                "speed_up": point.speed_up,
                "library_seconds": point.library_seconds,
                "error": point.error,
                "library_error": point.library_error,
            }
            for point in points
        ],
    }
