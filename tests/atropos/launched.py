"""A trainer and an environment for `penstock launch`, of the standard library alone, so that they start at once.

    python -I -S tests/atropos/launched.py trainer <batches> [status]      then exits with this status
    python -I -S tests/atropos/launched.py environment <groups>            then exits with status 0; -1: then waits
    python -I -S tests/atropos/launched.py server <port>                   answers any GET

Each has a child of its own, `pid <n>` of whose process is printed. At SIGTERM the trainer prints what it has trained.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any
from urllib.request import Request, urlopen

URL = os.environ["ATROPOS_API_URL"]


def ask(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(URL + path, data, {"Content-Type": "application/json"})) as answer:  # noqa: S310 (http alone)
        return json.load(answer)


def train(batches: int, status: int = 0) -> None:
    trained = 0
    try:
        about = {"wandb_group": "", "wandb_project": "", "checkpoint_dir": "", "save_checkpoint_interval": -1}
        ask("/register", about | {"batch_size": 4, "max_token_len": 64, "starting_step": 0, "num_steps": batches})
        while trained < 4 * batches:
            answer = ask("/batch?lease_s=60")
            if answer["batch"] is None:
                time.sleep(0.01)
                continue
            ask("/acknowledge", {"lease": answer["lease"]})
            trained += sum(len(group["tokens"]) for group in answer["batch"])
        sys.exit(status)
    finally:
        print(f"trained {trained}", flush=True)  # noqa: T201 (the test reads it)


def send(groups: int) -> None:
    about = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 4}
    while (admitted := ask("/register-env", about))["status"] != "success":
        time.sleep(0.01)
    group = {"tokens": [[5, 6]] * 4, "masks": [[-100, 6]] * 4, "scores": [1.0, 0.0] * 2, "env_id": admitted["env_id"]}
    for _ in range(abs(groups)):
        ask("/scored_data", group)
    while groups < 0:
        signal.pause()


def answer(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


def main(kind: str, *numbers: int) -> None:
    if not (child := os.fork()):
        signal.pause()
    print(f"pid {child}", flush=True)  # noqa: T201 (as above)
    if kind == "trainer":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        train(*numbers)
    elif kind == "environment":
        send(*numbers)
    else:
        answer(*numbers)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
