"""`inspect`, the plan and `check` say the same of an output, before it is written and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import agree, plan_of

import builders as b
import checkpoints
from w4pack.convert.errors import Refused

REAL = [
    *((name, "marlin") for name in checkpoints.names()),
    *((name, "compressed-tensors") for name in checkpoints.names()[::4]),
]


@pytest.mark.parametrize(("name", "to"), REAL)
def test_of_real_checkpoints(name: str, to: str, tmp_path: Path) -> None:
    source = checkpoints.lay_out(name, tmp_path / "source")
    try:
        planned = plan_of(source, tmp_path / "out", to=to)
    except Refused:
        assert not (tmp_path / "out").exists()
        return
    agree(tmp_path / "out", planned, to)


def made(folder: Path, config: dict[str, Any], *ordered: str, group: int = 64, **more: Any) -> Path:
    """Write a GPTQ model; layers whose names end so have an act-order."""
    model = b.model(5, config, group=group, **more)
    for name, linear in model.linears.items():
        if ordered and name.endswith(ordered):
            linear.gi = linear.gi[np.random.default_rng(6).permutation(linear.k)]
    return b.write(folder, model, b.gptq, b.gptq_config(group=group, desc=bool(ordered)))


SYNTHETIC: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any], int]] = {
    # config, ordered layers, options, max TP
    "plain": (b.llama_config(intermediate_size=512), (), {}, 4),
    "padded tiles": (b.llama_config(intermediate_size=416), (), {}, 1),
    "padded for TP": (b.llama_config(intermediate_size=416), (), {"pad_for_tp": 2}, 4),
    "order of up": (b.llama_config(intermediate_size=512), ("up_proj",), {}, 4),
    "order of o": (b.llama_config(intermediate_size=512), ("o_proj",), {}, 1),
    "order of down": (b.llama_config(intermediate_size=512), ("down_proj",), {}, 1),
    "order of down, folded": (
        b.llama_config(intermediate_size=512),
        ("down_proj",),
        {"fold_act_order": True},
        4,
    ),
    "experts": (b.mixtral_config(), (), {}, 4),
    "experts with order": (b.mixtral_config(), ("w2",), {}, 1),
    "three heads": (b.llama_config(hidden_size=192, num_attention_heads=3, num_key_value_heads=1), (), {}, 1),
}


@pytest.mark.parametrize("case", SYNTHETIC)
def test_of_synthetic_ones(case: str, tmp_path: Path) -> None:
    config, ordered, options, most = SYNTHETIC[case]
    source = made(tmp_path / "source", config, *ordered, group=32 if "tiles" in case else 64)
    told = agree(tmp_path / "out", plan_of(source, tmp_path / "out", **options), "marlin")
    assert told["max_tp"] == most
