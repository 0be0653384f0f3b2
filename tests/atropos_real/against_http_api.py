"""The tests that Atropos has for its HTTP server, run against `penstock gateway`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.atropos_real.processes import ROOT, started
from tests.failsafe import FAILSAFE_S

pytestmark = pytest.mark.timeout(600)

COUNTS = {"test_api_legacy.py": 3, "test_api_compression.py": 7, "test_api_messages_handling.py": 26}


@pytest.mark.parametrize(("file", "count"), COUNTS.items())
def test_the_gateway_passes_the_tests_of_the_original_server(
    file: str, count: int, checkout: Path, tmp_path: Path
) -> None:
    tests = checkout / "atroposlib/tests" / file
    options = ["-q", "-p", "no:cacheprovider", "-p", "tests.atropos_real.in_place_of_run_api", "-c", "/dev/null"]

    process = started("-m", "pytest", *options, f"--rootdir={tests.parent}", str(tests), cwd=ROOT, log=tmp_path / "log")
    said, _ = process.communicate(timeout=4 * FAILSAFE_S)

    assert re.search(rf"^{count} passed", said, re.MULTILINE), said
