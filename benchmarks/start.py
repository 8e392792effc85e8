"""What a start costs: the first product after load; from an empty process to the first token.

    python benchmarks/start.py first [--shapes 4096x4096,...] [--m 1,16,64,1024]
    python benchmarks/start.py cold [--where FOLDER] [--repeats 3]
    (no word: both; --quick: fewer of each; --device cpu --tiny: to try the script)

``first``: in a fresh process for each shape, with the card prepared as ``load`` does and tensors in place,
how much longer the first call takes than the second, for each M in turn (each M may be another kernel).
Where M is large enough that the operator calls the library, the library's own first call is in it; its time
alone is printed too, from a process that calls nothing else.

``cold``: an 8B-sized Llama checkpoint of random weights is written once, as GPTQ, and converted. Then, each
in a fresh process with a warm page cache, in turns, the first turn not counted: pre-packed (``w4pack.load``)
and the usual path (safetensors' ``load_file`` to the device, every layer repacked there by our own kernel,
the same model). The whole is the parent's clock, from before the process starts to the first token; the
parts are the child's.
Both paths must give the same token.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cards import need_in_children

TOKENS = 16  # of the prompt
SHAPES = "4096x4096,6144x4096,28672x4096,4096x14336,8192x8192,57344x8192"
WAYS = ("pre-packed", "usual")
NAMES = {"pre-packed": "pre-packed: w4pack.load", "usual": "usual: load_file, repack on the device"}


# ---- in a fresh process ----------------------------------------------------------------------------


class Parts:
    """Seconds of what a process does, one after another; ``started`` is the parent's clock."""

    def __init__(self, started: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = started

    def done(self, name: str) -> None:
        """Book the time since the last part, the card's work included."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def child_first(shape: str, ms: str, device: str) -> dict[str, Any]:
    """Time first and second calls of one shape."""
    import torch

    from w4pack.kernels import launch, ops

    n, k = map(int, shape.split("x"))
    if device == "cuda":
        launch.device(0)
    words = torch.randint(-(2**31), 2**31 - 1, (k // 16, 2 * n), dtype=torch.int32, device=device)
    scales = torch.full((k // 128, n), 0.01, dtype=torch.float16, device=device)
    xs = {m: torch.ones(m, k, dtype=torch.float16, device=device) for m in map(int, ms.split(","))}
    found = {}
    for m, x in xs.items():
        first, second = (
            clocked(lambda x=x: ops.gemm(x, words, scales, None, None, 4, 128)) for _ in range(2)
        )
        found[str(m)] = first - second
    return found


def child_library(device: str) -> dict[str, Any]:
    """Time the library's own first and second call."""
    import torch

    x = torch.ones(1024, 4096, dtype=torch.float16, device=device)
    first, second = (clocked(lambda: x @ x.t()) for _ in range(2))
    return {"library": first - second}


def clocked(run: Any) -> float:
    """Return the seconds of a call, from an idle card to an idle card."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def child_cold(way: str, folder: str, device: str, started: float) -> dict[str, Any]:
    """Load a model and take one token."""
    parts = Parts(started)
    import safetensors.torch
    import torch
    import transformers  # noqa: F401 - a part of its own

    from w4pack.kernels import transfer
    from w4pack.kernels.hf import load

    parts.done("imports")
    torch.zeros(1, device=device)
    parts.done("device")
    if way == "usual":
        model = usual(Path(folder), device, parts, safetensors.torch.load_file)
    else:
        read = transfer.load_tensors

        def timed(*args: Any, **more: Any) -> Any:
            parts.done("model")
            found = read(*args, **more)
            parts.done("read")
            return found

        transfer.load_tensors = timed
        model = load.load(folder, device)
        parts.done("model")
    with torch.inference_mode():
        ids = torch.arange(1, 1 + TOKENS, device=device)[None]
        logits = model(input_ids=ids, logits_to_keep=1).logits[0, -1]
        token, finite = int(logits.argmax()), bool(logits.isfinite().all())
    parts.done("first token")
    return {"parts": parts.seconds, "token": token, "finite": finite, "ended": time.monotonic()}


def usual(folder: Path, device: str, parts: Parts, load_file: Any) -> Any:
    """Read a GPTQ checkpoint as engines do: tensors to the device, then every layer repacked there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from w4pack.kernels.hf import load

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with load._parameters_on_meta(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    parts.done("model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for shard in dict.fromkeys(index["weight_map"].values()):
        tensors |= load_file(folder / shard, device=device)
    parts.done("read")
    for layer in range(config.num_hidden_layers):
        repack_layer(model, f"model.layers.{layer}", tensors)
    parts.done("repack")
    for name, tensor in tensors.items():
        if not name.endswith("_proj.g_idx"):
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module)._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    model.to(device)
    model.eval()
    parts.done("model")
    return model


def repack_layer(model: Any, base: str, tensors: dict[str, Any]) -> None:
    """Replace a layer's linears by packed ones, q/k/v and gate/up fused, as the loader does."""
    from w4pack.kernels import ops
    from w4pack.kernels.hf.skeleton import replace
    from w4pack.kernels.modules import FusedLinear, PackedLinear
    from w4pack.kernels.spec import LinearSpec, fuse

    for block, leaves in (
        ("self_attn", "qkv"),
        ("self_attn", "o"),
        ("mlp", ("gate", "up")),
        ("mlp", ("down",)),
    ):
        names = [f"{base}.{block}.{leaf}_proj" for leaf in leaves]
        words = cat([tensors.pop(f"{name}.qweight") for name in names])
        scales = cat([tensors.pop(f"{name}.scales") for name in names])
        sizes = [tensors.pop(f"{name}.qzeros").shape[1] * 8 for name in names]
        k = words.shape[0] * 8
        specs = [LinearSpec(k, n) for n in sizes]
        made = [PackedLinear(spec) for spec in specs]
        found = {"weight": ops.repack(words, None, 4), "weight_scale": scales[:, order(scales)].contiguous()}
        if len(made) == 1:
            for name, tensor in found.items():
                made[0]._put(name, tensor)
        else:
            spec = fuse(specs)
            assert spec is not None
            FusedLinear(spec, made, found)
        for name, module in zip(names, made, strict=True):
            replace(model, name, module)


def cat(parts: list[Any]) -> Any:
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def order(scales: Any) -> Any:
    """Return the grouped order of the columns, on the device, made once for each width."""
    import torch

    from w4pack.kernels.layout import grouped_order

    n = scales.shape[1]
    if n not in _orders:
        _orders[n] = torch.from_numpy(grouped_order(n)).to(scales.device)
    return _orders[n]


_orders: dict[int, Any] = {}


# ---- the parent ------------------------------------------------------------------------------------


def spawn(*words: object) -> dict[str, Any]:
    """Run this script in a fresh process; return what it prints last, and the seconds of the whole."""
    started = time.monotonic()
    command = [sys.executable, __file__, "child", *map(str, words), str(started)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"started": started}


def child(words: list[str]) -> None:
    """Do what the parent asks for; print one JSON object."""
    kind, *rest, started = words
    if kind == "first":
        found = child_first(*rest)
    elif kind == "library":
        found = child_library(*rest)
    else:
        found = child_cold(*rest, float(started))
    print(json.dumps(found), flush=True)


def first(shapes: list[str], ms: str, device: str) -> list[dict[str, Any]]:
    """Print the extra milliseconds of first calls."""
    print("extra time of the first call over the second, ms; a fresh process for each shape", flush=True)
    rows = []
    for shape in shapes:
        found = spawn("first", shape, ms, device)
        cells = "  ".join(f"M {m}: {1e3 * found[m]:7.2f}" for m in ms.split(","))
        print(f"  {shape:>12}  {cells}", flush=True)
        rows.append({"shape": shape, **found})
    library = spawn("library", device)["library"]
    print(f"  {'torch.mm':>12}  {1e3 * library:14.2f}  (the library alone)", flush=True)
    return [*rows, {"shape": "library", "seconds": library}]


def cold(where: Path | None, repeats: int, device: str, tiny: bool) -> list[dict[str, Any]]:
    """Print cold starts of both ways."""
    from llama import checkpoints

    with checkpoints(where, tiny) as (source, artifact):
        folders = {"pre-packed": artifact, "usual": source}
        sizes = {way: sum(f.stat().st_size for f in folder.iterdir()) for way, folder in folders.items()}
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for turn in range(1 + repeats):  # the first one warms the files that Python imports
            for way in WAYS:
                found = spawn("cold", way, folders[way], device)
                found["seconds"] = found["ended"] - found["started"]
                print(f"  turn {turn}" + told(way, sizes[way], [found]), flush=True)
                if turn:
                    runs[way].append(found)
    tokens = {run["token"] for way in WAYS for run in runs[way]}
    if len(tokens) != 1 or not all(run["finite"] for way in WAYS for run in runs[way]):
        raise SystemExit(f"the two paths differ, or their logits are not finite: tokens {tokens}")
    print(f"cold start: empty process to first token, median of {repeats}, warm page cache", flush=True)
    for way in WAYS:
        print(told(way, sizes[way], runs[way]), flush=True)
    usual, ours = (statistics.median(r["seconds"] for r in runs[way]) for way in ("usual", "pre-packed"))
    print(f"  {usual / ours:.2f}x, {usual - ours:.2f} s less; both give token {tokens.pop()}", flush=True)
    return [{"way": way, "bytes": sizes[way], "runs": runs[way]} for way in WAYS]


def told(way: str, size: int, runs: list[dict[str, Any]]) -> str:
    """Return the line of one way."""
    whole = statistics.median(run["seconds"] for run in runs)
    parts = {name: statistics.median(run["parts"][name] for run in runs) for name in runs[0]["parts"]}
    text = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
    return f"  {NAMES[way]:<40} {size / 1e9:5.2f} GB  {whole:6.2f} s: {text}"


def main() -> None:
    """Print what was asked for; write JSON to $OUT if set."""
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", choices=("first", "cold"))
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--m", default="1,16,64,1024")
    parser.add_argument("--where", type=Path, help="folder for 11 GB of files (default: temporary)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two shapes, one repeat")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and shapes, to try the script")
    options = parser.parse_args()
    need_in_children(options.device)
    shapes = ["256x256", "512x256"] if options.tiny else options.shapes.split(",")
    found = {}
    if options.what != "cold":
        found["first"] = first(shapes[: 2 if options.quick else None], options.m, options.device)
    if options.what != "first":
        repeats = 1 if options.quick else options.repeats
        found["cold"] = cold(options.where, repeats, options.device, options.tiny)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "start.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
