"""A plugin of pytest with which the tests of Atropos' server run `penstock gateway` in its place, on a free port.

They start `python -m atroposlib.cli.run_api` at port 8000, and ask http://localhost:8000. Nothing else of them changes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import requests  # type: ignore[import-untyped]  # pyright: ignore[reportMissingModuleSource]

SERVER = "atroposlib.cli.run_api"
URL = "http://localhost:8000"

with socket.create_server(("127.0.0.1", 0)) as listener:
    PORT = listener.getsockname()[1]

popen, request = subprocess.Popen, requests.Session.request


def start(command: Any, *arguments: Any, **options: Any) -> subprocess.Popen[Any]:
    if SERVER in command:
        command = [sys.executable, "-c", "from penstock._cli import main; main()", "gateway", "--port", str(PORT)]
    return popen(command, *arguments, **options)


def ask(session: Any, method: Any, url: Any, *arguments: Any, **options: Any) -> Any:
    return request(session, method, url.replace(URL, f"http://127.0.0.1:{PORT}"), *arguments, **options)


subprocess.Popen = start  # type: ignore[assignment,misc]
requests.Session.request = ask  # pyright: ignore[reportAttributeAccessIssue]
