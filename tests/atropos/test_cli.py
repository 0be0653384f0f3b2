"""The command line: invalid options end it with one sentence. Tests of the served application are in test_app.py."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.failsafe import FAILSAFE_S

from penstock.errors import InvalidConfig
from penstock.integrations.atropos import ServerConfig

OF_EXTRAS = (
    "aiohttp",
    "httptools",
    "matplotlib",
    "safetensors",
    "starlette",
    "tokenizers",
    "torch",
    "uvicorn",
)
"""Packages that only extras install."""

MAIN = """
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="penstock")
main = command.load()
"""
"""Finds the command in a script."""


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Return the exit code, or the message in its place, of a command that fails."""
    monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    (command,) = entry_points(group="console_scripts", name="penstock")
    with pytest.raises(SystemExit) as ended:
        command.load()()
    return ended.value.code


def test_a_host_beyond_loopback_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = str(exit_code(monkeypatch, "gateway", "--host", "0.0.0.0"))  # noqa: S104 (refused)

    assert sentence.startswith("penstock: host: expected a loopback address or a token, got 0.0.0.0 and none")
    assert "PENSTOCK_TOKEN" in sentence


@pytest.mark.parametrize("token", ["", " ", " token", "token\n", "t\u00f6ken", "to\0ken"])
def test_a_token_that_no_header_can_carry_is_refused(token: str) -> None:
    with pytest.raises(InvalidConfig, match=r"ServerConfig\.token: expected printable ASCII"):
        ServerConfig(token=token)


def test_shared_memory_of_no_size_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"ServerConfig\.shm_bytes: expected a whole number of at least 1, got 0"):
        ServerConfig(shm_bytes=0)


def test_an_empty_token_is_none_that_was_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").touch()

    assert "got an empty one" in str(exit_code(monkeypatch, "gateway", "--token-file", str(tmp_path / "token")))


def test_a_token_file_that_is_absent_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = str(tmp_path / "token")

    assert path in str(exit_code(monkeypatch, "gateway", "--token-file", path))


def test_a_token_is_no_option_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code(monkeypatch, "gateway", "--token", "secret") == 2


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        sentence = str(exit_code(monkeypatch, "gateway", "--port", str(port)))

    assert f"127.0.0.1:{port}: Address already in use; is another gateway running?" in sentence


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("port", "-1"),
        ("port", "65536"),
        ("capacity", "0"),
        ("capacity-bytes", "-3"),
        ("heartbeat-timeout-s", "0"),
        ("heartbeat-timeout-s", "-1"),
        ("heartbeat-timeout-s", "nan"),
        ("request-bytes", "0"),
        ("inflated-bytes", "0"),
    ],
)
def test_invalid_numbers_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert exit_code(monkeypatch, "gateway", f"--{option}", value) == 2
    assert f"--{option}" in capsys.readouterr().err


def without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an interpreter that finds no package of an extra."""
    hidden = f"import sys; sys.modules.update(dict.fromkeys({OF_EXTRAS!r}))\n{MAIN}\nmain()"
    return subprocess.run([sys.executable, "-c", hidden, *arguments], capture_output=True, text=True, check=False)


def test_the_help_needs_no_extra() -> None:
    ran = without_extras("--help")

    assert ran.returncode == 0, ran.stderr
    assert "gateway" in ran.stdout


def test_a_command_without_its_extra_names_the_package_to_install() -> None:
    ran = without_extras("gateway")

    assert ran.returncode == 1
    assert ran.stderr.startswith("penstock: penstock gateway needs uvicorn")
    assert "[gateway]" in ran.stderr.partition("pip install ")[2]


def test_a_key_without_its_certificate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "expected a certfile beside it" in str(exit_code(monkeypatch, "gateway", "--keyfile", "key.pem"))


def test_an_invalid_certificate_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")

    for path in (tmp_path / "cert.pem", tmp_path / "absent.pem"):
        sentence = str(exit_code(monkeypatch, "gateway", "--port", "0", "--certfile", str(path)))
        assert f"expected a certificate and its key in PEM in {path}" in sentence


SERVED = f"""
import gc
import sys
{MAIN}
before = gc.get_threshold()
sys.argv = ["penstock", "gateway", "--port", "0", *sys.argv[1:]]
try:
    main()
finally:
    assert gc.get_threshold() == (100_000, *before[1:]), gc.get_threshold()
    assert gc.get_freeze_count() > 0
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_gateway_that_listens_prints_its_url_and_collects_garbage_rarely(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SERVED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        listening = server.stdout.readline()
        server.send_signal(number)
        _, errors = server.communicate()

    assert listening.startswith("listening at http://127.0.0.1:")
    assert (server.returncode, errors) == (0, "")


def test_the_token_of_a_gateway_is_not_in_its_command_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("only-for-clients\n")
    command = [sys.executable, "-c", SERVED, "--token-file", str(tmp_path / "token")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        refused = status_of(f"{url}/status")
        accepted = status_of(f"{url}/status", "only-for-clients")
        shown = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        server.terminate()

    assert (refused, accepted) == (401, 200)
    assert b"only-for-clients" not in shown


def status_of(url: str, token: str | None = None) -> int:
    """Return the status with which `url` is answered."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=FAILSAFE_S) as response:  # noqa: S310 (of this host)
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:  # it is the response, too
            return error.code
