"""An environment for Atropos, which uses HTTP and JSON and does not depend on penstock.

    python examples/atropos/guessing_environment.py http://127.0.0.1:8000

Its task is the digit after a given one; it guesses. Like environments of Atropos, it opens a connection for every
request, compresses its data, and uses /status-env to find out whether to pause.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import sys
import time
import urllib.error
import urllib.request
from typing import Any

GUESSES = 8
"""Completions of a prompt, one token each."""


def request(url: str, body: Any = None, *, method: str = "GET", **headers: str) -> Any:
    """Send a request; return the content of the response."""
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    prepared = urllib.request.Request(url, body, sent, method=method)  # noqa: S310 (the caller's http URL)
    with urllib.request.urlopen(prepared, timeout=10) as response:  # noqa: S310
        return json.load(response)


def guesses(env_id: int, draw: random.Random) -> dict[str, Any]:
    """Return one prompt with several guesses: score 1 for a right one, 0 for a wrong one."""
    digit = draw.randrange(10)
    completions = [draw.randrange(10) for _ in range(GUESSES)]
    return {
        "tokens": [[digit, guess] for guess in completions],
        "masks": [[-100, guess] for guess in completions],
        "scores": [float(guess == (digit + 1) % 10) for guess in completions],
        "inference_logprobs": [[1.0, math.log(0.1)]] * GUESSES,
        "env_id": env_id,
    }


def main(url: str) -> None:
    """Register, then send guesses while the queue is short, until the trainer has done its steps."""
    fields = {"max_token_length": 2, "desired_name": "guessing", "weight": 1.0, "group_size": GUESSES}
    while (registered := request(f"{url}/register-env", fields, method="POST"))["status"] != "success":
        time.sleep(1)
    batch_size, draw = request(f"{url}/info")["batch_size"], random.Random(registered["env_id"])  # noqa: S311 (guesses)
    while True:
        status = request(f"{url}/status-env", {"env_id": registered["env_id"]})
        if status["current_step"] >= registered["num_steps"]:
            return
        if status["queue_size"] * GUESSES >= 3 * batch_size:
            time.sleep(0.01)
            continue
        for _ in range(batch_size // GUESSES):
            group = gzip.compress(json.dumps(guesses(registered["env_id"], draw)).encode())
            request(f"{url}/scored_data", group, method="POST", Content_Encoding="gzip")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except urllib.error.HTTPError:
        raise
    except OSError as error:
        print(f"the trainer has closed: {error}")
