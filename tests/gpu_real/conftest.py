"""A GPU, without which these tests do not begin."""

from __future__ import annotations

import pytest
import torch


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        pytest.exit(
            "expected a GPU that torch finds, got none: run `make test-gpu` on a machine with one", returncode=1
        )
