"""Fixtures of the losses' tests."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Use one thread: the tensors are small."""
