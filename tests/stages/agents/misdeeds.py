"""The misdeeds of agents, and a program that does them; of the standard library alone, so that it starts at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request

MISDEEDS = ("hangs", "forks", "leaks", "is killed")

LEAKED: list[socket.socket] = []


def misbehave(does: str) -> None:
    """Do a misdeed."""
    if does == "forks":  # a daemon, in a session of its own
        subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"], start_new_session=True)  # noqa: S607 (of any path)
    if does == "leaks":
        LEAKED.extend(socket.create_server(("127.0.0.1", 0)) for _ in range(8))
        tempfile.mkdtemp()
    if does == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()


def main() -> None:
    """Ask, reward, and misbehave as the row says."""
    row = json.load(sys.stdin)
    asked = {"messages": [{"role": "user", "content": "?"}]}
    for path, body in [("/chat/completions", asked), ("/reward", {"value": 1})]:
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode())  # noqa: S310
        urllib.request.urlopen(request).read()  # noqa: S310 (of the endpoint)
    misbehave(row["does"])


if __name__ == "__main__":
    main()
