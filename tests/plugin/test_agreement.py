"""`w4pack check --engine vllm` and the plugin say the same of how a model can be cut.

Models of random sizes: what the rules say of their facts, against what the layers' own arithmetic makes of
the sizes that the engine asks each rank for (the formulas of its q/k/v, merged, column and row layers).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from artifacts import quant_block  # noqa: E402
from plugin import standins  # noqa: E402

from w4pack.convert.errors import W4PackError  # noqa: E402
from w4pack.convert.files.tensorfile import TensorInfo  # noqa: E402
from w4pack.kernels.spec import LinearSpec  # noqa: E402
from w4pack.kernels.vllm.source import Source  # noqa: E402

HIDDEN = 256
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


@dataclass(frozen=True)
class Sizes:
    """One decoder layer, and how it is packed; ``joined``: q/k/v are one module of the file, gate/up one."""

    heads: int
    kv: int
    head: int
    inner: int
    group: int
    ordered: bool
    joined: bool
    ranks: int

    @property
    def even(self) -> bool:
        """Whether the engine itself can share the heads out."""
        shared = self.kv % self.ranks == 0 or self.ranks % self.kv == 0
        return self.heads % self.kv == 0 and self.heads % self.ranks == 0 and shared

    @property
    def fused(self) -> dict[str, dict[str, int]]:
        """Layers of the engine that are several modules: columns of each."""
        q, kv = self.heads * self.head, self.kv * self.head
        return {
            f"{ATTENTION}.qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
            f"{MLP}.gate_up_proj": {"gate_proj": self.inner, "up_proj": self.inner},
        }

    def specs(self) -> dict[str, LinearSpec]:
        """Return the modules of the file. Odd widths are padded to whole tiles, as the converter does."""
        found = {
            f"{ATTENTION}.o_proj": self.spec(self.heads * self.head, HIDDEN),
            f"{MLP}.down_proj": self.spec(self.inner, HIDDEN),
        }
        for name, parts in self.fused.items():
            if self.joined:
                found[name] = self.spec(HIDDEN, sum(parts.values()))
            else:
                parent = name.rpartition(".")[0]
                found |= {f"{parent}.{leaf}": self.spec(HIDDEN, width) for leaf, width in parts.items()}
        return found

    def spec(self, inputs: int, outputs: int) -> LinearSpec:
        """Return a module."""
        stored = {"stored_in": -(-inputs // 64) * 64, "stored_out": -(-outputs // 64) * 64}
        return LinearSpec(inputs, outputs, group_size=self.group, act_order=self.ordered, **stored)

    def asked(self) -> dict[str, tuple[int, list[int]]]:
        """Return what the engine asks of a rank: inputs, and outputs of each part."""
        each = (self.heads // self.ranks, max(1, self.kv // self.ranks))
        q, kv = (number * self.head for number in each)
        return {
            f"{ATTENTION}.qkv_proj": (HIDDEN, [q, kv, kv]),
            f"{ATTENTION}.o_proj": (self.heads * self.head // self.ranks, [HIDDEN]),
            f"{MLP}.gate_up_proj": (HIDDEN, [self.inner // self.ranks] * 2),
            f"{MLP}.down_proj": (self.inner // self.ranks, [HIDDEN]),
        }


def source_of(sizes: Sizes) -> Source:
    """Return what the plugin knows of such a file."""
    specs = sizes.specs()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv,
        "head_dim": sizes.head,
        "quantization_config": quant_block(specs),
    }
    tensors = {
        f"{name}.{suffix}": TensorInfo(f"{name}.{suffix}", tag, shape, "", 0, 0)
        for name, spec in specs.items()
        for suffix, shape in spec.shapes().items()
        for tag in ["F16" if suffix == "weight_scale" else "I32"]
    }
    return Source(config, specs, tensors)


def layers(sizes: Sizes, rank: int) -> Iterator[tuple[Any, int, list[int], tuple[str, ...]]]:
    """Yield the engine's layers of a rank: layer, inputs, outputs, modules of the file."""
    for name, (inputs, outputs) in sizes.asked().items():
        layer = standins.Linear(name, rank, sizes.ranks)
        parts = sizes.fused.get(name)
        if parts and not sizes.joined:
            parent = name.rpartition(".")[0]
            yield layer, inputs, outputs, tuple(f"{parent}.{leaf}" for leaf in parts)
            continue
        if parts and name.endswith("qkv_proj"):
            heads = {"total_num_heads": sizes.heads, "total_num_kv_heads": sizes.kv, "head_size": sizes.head}
            vars(layer).update(heads)
        elif parts:
            layer.output_sizes = list(parts.values())
        yield layer, inputs, outputs, (name,)


def is_cut(sizes: Sizes, found: Source) -> bool:
    """Tell whether every rank's share of every layer can be had."""
    from w4pack.kernels.vllm.linear import W4PackLinearMethod
    from w4pack.kernels.vllm.parts import Rank, Wanted

    if sizes.inner % sizes.ranks:
        return False  # the engine's own assertion
    try:
        for rank in range(sizes.ranks):
            for layer, inputs, outputs, members in layers(sizes, rank):
                wanted = Wanted(layer.prefix, inputs, tuple(outputs))
                W4PackLinearMethod(found, members)._parts(layer, wanted, Rank(rank, sizes.ranks))
    except W4PackError:
        return False
    return True


def samples(count: int) -> Iterator[Sizes]:
    """Yield models, always the same ones."""
    choose = random.Random(3).choice
    while count:
        sizes = Sizes(
            heads=choose((2, 4, 8)), kv=choose((1, 2, 4, 8)), head=choose((16, 32, 64, 128)),
            inner=choose((64, 128, 192, 256, 320, 512, 600)), group=choose((32, 64, 128, -1)),
            ordered=choose((False, False, True)), joined=choose((False, True)), ranks=choose((1, 2, 4, 8)),
        )  # fmt: skip
        if sizes.even:
            count -= 1
            yield sizes


def test_the_rules_and_the_plugin_agree_on_every_cut() -> None:
    seen: dict[tuple[bool, bool, bool], int] = {}
    with standins.engine():
        for sizes in samples(600):
            found = source_of(sizes)
            try:
                found.refuse(sizes.ranks)
                taken = True
            except W4PackError:
                taken = False
            cut = is_cut(sizes, found)
            assert taken == cut, f"{sizes}: check says {taken}, the layers say {cut}"
            key = (cut, sizes.joined, sizes.ranks > 1)
            seen[key] = seen.get(key, 0) + 1
    # every kind was met, more than once: taken and refused, joined or not, on several ranks
    assert all(seen[cut, joined, True] > 10 for cut in (True, False) for joined in (True, False)), seen
