"""What the tests of quantization start from: one tiny Llama, its text, one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantize import sources


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float16 Llama of two layers."""
    return sources.save(sources.llama(), tmp_path_factory.mktemp("quantize") / "llama")


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 Mixtral of two layers and four experts."""
    folder = tmp_path_factory.mktemp("quantize") / "mixtral"
    return sources.save(sources.mixtral(), folder, torch.bfloat16)


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of about 3,000 tokens."""
    return sources.text(tmp_path_factory.mktemp("quantize") / "book.txt")
