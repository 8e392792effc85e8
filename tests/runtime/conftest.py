"""What the tests of running artifacts share: one thread."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every test here runs on one thread."""
