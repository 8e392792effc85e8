"""Rotation and GPTQ of a large model's shapes on one GPU: time, peak memory, what the time goes to.

    python benchmarks/quantize_speed.py --work FOLDER --shapes llama-3-8b [--layers 4,12] [--rotate offline]

Weights are random bfloat16; what they are does not change the time. For each number of layers a model is
written to FOLDER, converted as `w4pack convert --rotate offline
--quantize gptq --group-size 128 --device cuda` does, and removed. With two numbers of layers the time of a
layer is their difference over the layers between them, and the time of the whole model follows from it; peak
memory of both is printed, which says whether it grows with depth.

The floor is what no arrangement avoids: one pass of the calibration tokens through the quantized and the
source's layer, half of each H (it is symmetric) and all of each D, at the rate of a large bfloat16 product
that is measured first.

Times are those of a run in which nothing is measured. What they go to is taken in a second one (``--parts``),
with a synchronisation around each part: there the parts of the main thread add up to a time that is longer,
and what the threads that read and write do meanwhile is listed apart.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cards import need
from safetensors.torch import save_file

from w4pack.convert import api
from w4pack.convert.jobs.running import Running
from w4pack.convert.planning.options import ConvertOptions
from w4pack.convert.planning.quantize_options import QuantizeOptions

SAMPLES, SEQLEN = 128, 2048
BYTES = 256  # the tokenizer's vocabulary: one token a byte


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of a Llama."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    head_dim: int = 128

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return name -> (outputs, inputs) of a layer."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }

    def floor(self, tokens: int) -> float:
        """Return the operations of a layer that cannot be left out."""
        q = self.heads * self.head_dim
        weights = sum(n * k for n, k in self.linears().values())
        attention = 2 * tokens * SEQLEN * q  # causal: half of q kT and of a v
        inputs = (self.hidden, q, self.hidden, self.inner)
        return 2 * (2 * tokens * weights + attention) + sum(3 * tokens * k * k for k in inputs)


SHAPES = {
    "llama-3-8b": Shapes(4096, 14336, 32, 8, 32, 128256),
    "llama-3-70b": Shapes(8192, 28672, 64, 8, 80, 128256),
    "tiny": Shapes(256, 512, 2, 1, 2, 512),
}


def write_model(folder: Path, shapes: Shapes, layers: int) -> None:
    """Write a random model with a tokenizer of bytes, one shard a layer."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.inner,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.head_dim,
        "num_hidden_layers": layers,
        "vocab_size": shapes.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder)
    index: dict[str, str] = {}
    outside = {
        "model.embed_tokens.weight": (shapes.vocabulary, shapes.hidden),
        "lm_head.weight": (shapes.vocabulary, shapes.hidden),
        "model.norm.weight": (shapes.hidden,),
    }
    inside = {f"{name}.weight": size for name, size in shapes.linears().items()}
    inside |= dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (shapes.hidden,))
    for number in range(layers + 1):
        prefix = f"model.layers.{number - 1}." if number else ""
        made = {prefix + n: _random(s) for n, s in (inside if number else outside).items()}
        name = f"model-{number + 1:05d}-of-{layers + 1:05d}.safetensors"
        save_file(made, folder / name, {"format": "pt"})
        index.update(dict.fromkeys(made, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _random(size: tuple[int, ...]) -> torch.Tensor:
    if len(size) == 1:
        return (1 + 0.1 * torch.randn(size)).bfloat16()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.randn(size, device=device, dtype=torch.bfloat16) * 0.02).cpu()


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


class Clock:
    """Seconds of each part, of the main thread and of the others; a part within another is taken off it."""

    def __init__(self) -> None:
        self.main: dict[str, float] = defaultdict(float)
        self.meanwhile: dict[str, float] = defaultdict(float)
        self._here = threading.local()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Measure every call of a function of a class or a module."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **more: Any) -> Any:
            with self._timed(part):
                return original(*args, **more)

        setattr(owner, name, timed)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        leads = threading.current_thread() is threading.main_thread()
        inner: list[float] = self._here.__dict__.setdefault("inner", [])
        _settle(leads)
        started = time.monotonic()
        inner.append(0.0)
        try:
            yield
        finally:
            _settle(leads)
            spent = time.monotonic() - started
            (self.main if leads else self.meanwhile)[part] += spent - inner.pop()
            if inner:
                inner[-1] += spent


def _settle(leads: bool) -> None:
    """Wait for the card. Not in other threads: they would wait for the main one's arithmetic."""
    if leads:
        torch.cuda.synchronize()


def instrument() -> Clock:
    """Put clocks around the parts of the work."""
    from w4pack.convert.files.provider import CheckpointProvider
    from w4pack.convert.files.readahead import ReadAhead
    from w4pack.convert.modeljobs import overlap, quantized
    from w4pack.convert.modeljobs.layerfiles import LayerFiles
    from w4pack.convert.modeljobs.quantizerun import QuantizeRun
    from w4pack.convert.quantize import gptq, grids, linears, stream
    from w4pack.convert.quantize.hessian import Statistics
    from w4pack.convert.quantize.skeleton import Skeleton
    from w4pack.convert.rotate.rotated import Rotated

    clock = Clock()
    for owner, name, part in (
        (quantized, "check_rotation", "equality gate"),
        (CheckpointProvider, "_read", "reading files, to the card"),
        (ReadAhead, "get", "waiting for the thread that reads"),
        (overlap.Behind, "wait", "waiting for the thread that writes"),
        (Rotated, "get", "rotation"),
        (Skeleton, "fill", "placing weights"),
        (stream.Stream, "run", "layers' own arithmetic"),
        (Statistics, "add", "sums of H and D"),
        (gptq, "factored", "factoring H"),
        (grids, "search", "search for scales"),
        (gptq, "solve", "choosing codes"),
        (linears, "_better", "measuring errors"),
        (linears, "_finish", "packing words, to the host"),
        (LayerFiles, "write", "tiles, writing"),
        (LayerFiles, "finished", "hashing"),
        (LayerFiles, "copy", "copied tensors"),
        (QuantizeRun, "_journal", "fsync and journal"),
    ):
        clock.wrap(owner, name, part)
    return clock


@contextmanager
def calibration(work: Path) -> Iterator[Path]:
    """A text of as many bytes as there are calibration tokens."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (SAMPLES * SEQLEN,), generator=generator, dtype=torch.uint8)
    path = work / "letters.txt"
    path.write_bytes(letters.numpy().tobytes())
    yield path
    path.unlink()


def measure(
    shapes: Shapes, layers: int, given: argparse.Namespace, clock: Clock | None = None
) -> dict[str, Any]:
    """Write a model, convert it, remove both. Returns the figures."""
    from w4pack.kernels.packing import packer_on

    work = Path(given.work)
    source, out = work / "source", work / "out"
    for folder in (source, out):
        shutil.rmtree(folder, ignore_errors=True)
    write_model(source, shapes, layers)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if clock is not None:
        clock.main.clear()
        clock.meanwhile.clear()
    with calibration(work) as text:
        asked = QuantizeOptions(
            method="gptq",
            gptaq=not given.no_gptaq,
            group_size=128,
            calibration=str(text),
            samples=SAMPLES,
            seqlen=SEQLEN,
        )
        options = ConvertOptions(to="marlin", rotate=given.rotate, quantize=asked)
        running = Running(device="cuda", packer=packer_on("cuda") if given.pack else None)
        started = time.monotonic()
        api.convert(source, out, options=options, running=running)
        torch.cuda.synchronize()
        seconds = time.monotonic() - started
    shutil.rmtree(source)
    shutil.rmtree(out)
    parts, meanwhile = ({}, {}) if clock is None else (_sorted(clock.main), _sorted(clock.meanwhile))
    if clock is not None:
        parts["the rest"] = seconds - sum(parts.values())
    return {
        "layers": layers,
        "seconds": seconds,
        "parts": parts,
        "meanwhile": meanwhile,
        "gpu_gib": torch.cuda.max_memory_allocated() / 2**30,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _sorted(seconds: dict[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def rate() -> float:
    """Return the operations a second of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    return float(10 * 2 * 8192**3 / (time.monotonic() - started))


def _table(found: list[dict[str, Any]]) -> str:
    """Return the figures of runs for people."""
    lines = []
    for value in found:
        lines.append(
            f"{value['layers']} layers: {value['seconds']:.1f} s, peak {value['gpu_gib']:.2f} GiB on the GPU,"
            f" {value['host_gib']:.2f} GiB of host memory"
        )
        lines += [f"    {part:36} {s:7.2f} s" for part, s in value["parts"].items()]
        if value["meanwhile"]:
            lines.append("  meanwhile, in threads:")
            lines += [f"    {part:36} {s:7.2f} s" for part, s in value["meanwhile"].items()]
    return "\n".join(lines)


def _whole(shapes: Shapes, found: list[dict[str, Any]], speed: float) -> str:
    """Return the floor of a layer and, from two runs, the time of a layer and of the whole model."""
    floor = shapes.floor(SAMPLES * SEQLEN) / speed
    lines = [f"floor of a layer: {floor:.2f} s at {speed / 1e12:.0f} TFLOP/s"]
    if len(found) > 1:
        first, last = found[0], found[-1]
        each = (last["seconds"] - first["seconds"]) / (last["layers"] - first["layers"])
        whole = last["seconds"] + each * (shapes.layers - last["layers"])
        lines.append(
            f"a layer: {each:.2f} s, {floor / each:.0%} of it the floor;"
            f" all {shapes.layers} layers: {whole:.0f} s"
            + ("" if last["layers"] == shapes.layers else " (extrapolated)")
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", required=True)
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=lambda s: [int(i) for i in s.split(",")], default=[4, 12])
    parser.add_argument("--rotate", choices=["none", "offline"], default="offline")
    parser.add_argument("--no-gptaq", action="store_true", help="GPTQ without the shift")
    parser.add_argument("--parts", action="store_true", help="then measure what the time goes to")
    parser.add_argument("--pack", action="store_true", help="make the tiles on the GPU")
    parser.add_argument("--vocabulary", type=int, help="another size of the embeddings")
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()
    need()
    shapes = SHAPES[given.shapes]
    if given.vocabulary:
        shapes = replace(shapes, vocabulary=given.vocabulary)
    Path(given.work).mkdir(parents=True, exist_ok=True)
    speed = rate()
    measure(SHAPES["tiny"], 1, given)  # imports, the libraries' first calls
    found = []
    for layers in given.layers:
        found.append(measure(shapes, layers, given))
        print(_table(found[-1:]), flush=True)
    print(_whole(shapes, found, speed), flush=True)
    if given.parts:
        print("with a synchronisation around each part:")
        clock = instrument()
        found += [measure(shapes, given.layers[-1], given, clock)]
        print(_table(found[-1:]), flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps({"rate": speed, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
