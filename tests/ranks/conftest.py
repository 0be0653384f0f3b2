"""Two hosts, and a run of a single process, for the runs of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from chaos.network import LinkNotPossible
from tests.ranks.script_of_a_run import train, trainer_of
from tests.ranks.torchrun import Hosts, two_hosts
from tests.tiny_model import ReadModel


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Make two hosts, which share the folders of this one."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except LinkNotPossible as error:
            pytest.skip(str(error))
        yield hosts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train as a single process, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("alone")
    train(trainer_of(ReadModel()), folder)
    return folder
