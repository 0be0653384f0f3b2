"""A server from outside, as the tests want it: `python -I -S outside.py <port> [trait …]`. Answers any GET with 200.

late: with 503 for the first two times. stubborn: SIGTERM does nothing. family: has a child, a grandchild in a session
of its own, and an orphan in another; it listens when all have printed their pids. deaf: never listens. doomed: exits
with status 3 instead of listening. broken: prints the traceback of a process that it started, and then its own, and
exits with status 1. A request for /die makes it exit with status 4.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

port, traits = int(sys.argv[1]), sys.argv[2:]


def report(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def linger() -> None:
    report(f"pid {os.getpid()}")
    os.close(printed)
    while True:
        signal.pause()


def end(*_: object) -> None:
    report("ended")
    sys.exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in traits else end)
report(f"pid {os.getpid()}")
if "family" in traits:
    all_printed, printed = os.pipe()
    if not os.fork():
        if not os.fork():
            os.setsid()
            linger()
        linger()
    if not os.fork():
        if not os.fork():
            os.setsid()
            linger()
        os._exit(0)
    os.close(printed)
    os.read(all_printed, 1)
if "doomed" in traits:
    report("no such model")
    sys.exit(3)
if "broken" in traits:
    report("(Worker pid=7) ERROR 12:00 [executor.py:9] Traceback (most recent call last):")
    report('(Worker pid=7) ERROR 12:00 [executor.py:9]   File "loader.py", line 3, in load')
    report("(Core pid=6) INFO 12:00 [core.py:1] waiting for workers")
    report("(Worker pid=7) ERROR 12:00 [executor.py:9] SafetensorError: incomplete metadata")
    report("noise\n" * 1000)
    raise RuntimeError("Engine core initialization failed. See root cause above.")
if "deaf" in traits:
    while True:
        signal.pause()
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind(("127.0.0.1", port))
listener.listen()
answers = 0
while True:
    connection, _ = listener.accept()
    with connection:
        request = connection.recv(4096)
        answers += 1
        status = "503 Loading" if "late" in traits and answers <= 2 else "200 OK"
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
    if b" /die " in request:
        report("as you wish")
        os._exit(4)
