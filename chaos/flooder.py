"""A peer that has the key, floods a trainer's port with messages that no handshake has, and dies."""

from __future__ import annotations

import os
import random
import signal
import time

import zmq

from penstock.channels import ChannelKey

__all__ = ["flood"]

FLOOD_S = 0.5
"""Seconds for which it sends."""

MESSAGES = (b"", b"\xc1", bytes(33), bytes(1000), b"\x91\xadCreditRequest")
"""No message; bytes that are none; short and long ones; and one of a sender that has joined."""


def flood(url: str, key: ChannelKey, seed: str) -> None:
    """Send one of `MESSAGES` as fast as possible, with heartbeats in between, then end this process by SIGKILL."""
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 100_000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 0)
    key.protect(socket, "sender")
    socket.connect(url)
    message, until = random.Random(seed).choice(MESSAGES), time.monotonic() + FLOOD_S  # noqa: S311 (no secret)
    while time.monotonic() < until:
        for _ in range(100):
            socket.send(message)
    os.kill(os.getpid(), signal.SIGKILL)
