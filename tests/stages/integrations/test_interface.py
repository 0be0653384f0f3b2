"""A name that an installed framework lacks is one error, and a version that was not tried is one warning."""

from __future__ import annotations

from importlib.metadata import version

import msgspec
import pytest
from structlog.testing import capture_logs

from penstock._stages.integrations import interface
from penstock._stages.integrations.interface import installed_version, module_with, object_in
from penstock.errors import MissingInterface


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a framework that is installed, and was tried in another version."""
    monkeypatch.setitem(interface.TRIED, "msgspec", "0.1")
    installed_version.cache_clear()
    return "msgspec"


def test_a_name_is_found_in_its_module(framework: str) -> None:
    assert object_in(framework, "msgspec.json", "encode") is msgspec.json.encode
    assert module_with(framework, "msgspec.json", "encode", "decode") is msgspec.json


@pytest.mark.parametrize(
    ("module", "missing"), [("msgspec.json", "msgspec.json.dumps"), ("msgspec.xml", "msgspec.xml")]
)
def test_a_module_or_a_name_that_is_missing_is_named_with_the_version_to_install(
    framework: str, module: str, missing: str
) -> None:
    with pytest.raises(MissingInterface, match=rf"expected {missing}, found none .*: install msgspec==0\.1"):
        module_with(framework, module, "encode", "dumps")


def test_a_version_that_was_not_tried_is_warned_of_once(framework: str) -> None:
    with capture_logs() as logs:
        assert installed_version(framework) == installed_version(framework) == version(framework)

    assert [(line["event"], line["tried"]) for line in logs] == [("framework_version_untried", "0.1")]
