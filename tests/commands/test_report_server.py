"""`penstock report --serve`: on loopback, by its own name, and with new data once a file has changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
from tests.commands.served_page import COMMAND, served
from tests.commands.written_run import write_lines, write_run
from tests.failsafe import FAILSAFE_S


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def port(run: Path) -> Iterator[int]:
    with served(run) as url:
        yield int(url.rstrip("/").rpartition(":")[2])


def get(port: int, path: str, **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=FAILSAFE_S)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def test_the_page_may_ask_its_own_server_and_no_other(port: int) -> None:
    answer, page = get(port, "/")

    assert answer.status == 200
    assert b'data-follows="yes"' in page
    policy = str(answer.headers["Content-Security-Policy"])
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("host", ["attacker.example", "attacker.example:80", "127.0.0.1.attacker.example", "[::1]", ""])
@pytest.mark.parametrize("path", ["/", "/data.json"])
def test_a_request_for_another_name_is_refused(port: int, host: str, path: str) -> None:
    answer, body = get(port, path, Host=host)

    assert answer.status == 400
    assert b"runs" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000"])
def test_the_names_of_loopback_are_answered(port: int, host: str) -> None:
    assert get(port, "/data.json", Host=host)[0].status == 200


def test_nothing_else_is_served(port: int) -> None:
    assert {get(port, path)[0].status for path in ("/metrics.jsonl", "/../config.json", "/%2e%2e/config.json")} == {404}


def test_data_are_sent_again_once_a_file_has_changed(port: int, run: Path) -> None:
    first, body = get(port, "/data.json")
    tag = str(first.headers["ETag"])
    same, nothing = get(port, "/data.json", If_None_Match=tag)
    write_lines(run / "metrics.jsonl", [{"step": 77, "reward": 0.5}])
    changed, newer = get(port, "/data.json", If_None_Match=tag)

    assert (same.status, nothing) == (304, b"")
    assert changed.status == 200
    assert [json.loads(each)["runs"][0]["curves"]["last_step"] for each in (body, newer)] == [20, 77]


def test_a_port_that_is_taken_is_named(port: int, run: Path) -> None:
    ended = subprocess.run(
        [*COMMAND, "--serve", "--port", str(port), str(run)], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use; give another --port" in ended.stderr
