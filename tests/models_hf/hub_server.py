"""A server of one repository that answers as the Hub does where its client downloads files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


@dataclass
class Hub:
    """The files that it serves, and the names of those that were downloaded, each time."""

    files: dict[str, bytes]
    downloads: list[str] = field(default_factory=list)
    killing: str | None = None
    """The first process that downloads this file gets a half of it, and is killed."""


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serve `hub` within the body, and yield the URL."""

    class Handler(Answers):
        served = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Answers(BaseHTTPRequestHandler):
    served: Hub

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (as the method that it replaces)
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        hub, path = self.served, self.path.partition("?")[0]
        name = path.partition("/resolve/")[2].partition("/")[2]
        if name in hub.files:
            self.send_file(name, with_body=with_body)
        elif "/revision/" in path:
            self.send_body(
                200, json.dumps({"id": "", "sha": COMMIT, "siblings": [{"rfilename": n} for n in hub.files]})
            )
        elif "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": etag(b)} for n, b in hub.files.items()]
            self.send_body(200, json.dumps(tree))
        else:
            self.send_body(404, "")

    def send_body(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def send_file(self, name: str, *, with_body: bool) -> None:
        hub, body = self.served, self.served.files[name]
        self.send_response(200)
        self.send_header("ETag", f'"{etag(body)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not with_body:
            return
        hub.downloads.append(name)
        if name == hub.killing:
            hub.killing = None
            self.wfile.write(body[: len(body) // 2])
            os.kill(self.client_pid(), signal.SIGKILL)
        else:
            self.wfile.write(body)

    def client_pid(self) -> int:
        """Return the process that asks, which its user agent names."""
        found = re.search(r"pid/(\d+)", self.headers["User-Agent"])
        assert found
        return int(found[1])


def etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()  # noqa: S324 (a name)
