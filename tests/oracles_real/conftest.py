"""Fixtures of the comparisons with the code of the peers."""

import pytest


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:  # noqa: ARG001
    """Use one thread, for the tensors are small, and let TRL import what it calls experimental."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
