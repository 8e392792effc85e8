"""What the tests of quantization start from: one tiny Llama, its text, one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quantize import sources


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
