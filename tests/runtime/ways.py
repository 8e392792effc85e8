"""Both ways into transformers, and an artifact to take by either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import w4pack
from runtime import models
from w4pack.convert import convert

NAME = "gptqmodel-w4g32-asym-desc-qwen2"
EXPERTS = "gptqmodel-w4g32-sym-desc-mixtral"
WAYS: dict[str, Callable[..., Any]] = {
    "load": w4pack.load,
    "from_pretrained": AutoModelForCausalLM.from_pretrained,
}
way = pytest.mark.parametrize("way", WAYS)


def converted(name: str, place: Path) -> Path:
    """Make an artifact of a fixture in a folder."""
    convert(models.source(name, place), place / "out")
    return place / "out"
