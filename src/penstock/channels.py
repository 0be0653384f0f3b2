"""The channels between stages, within one event loop, between processes and between hosts."""

from __future__ import annotations

from .pipeline.channels.carriers import connect, serve
from .pipeline.channels.channel import ChannelStatistics
from .pipeline.channels.keys import ChannelKey
from .pipeline.channels.lasting_sender import LastingSender, outlast
from .pipeline.channels.memory import MemoryReceiver, MemorySender, memory_channel
from .pipeline.channels.remote_receiver import RemoteReceiver
from .pipeline.channels.remote_sender import RemoteSender

__all__ = [
    "ChannelKey",
    "ChannelStatistics",
    "LastingSender",
    "MemoryReceiver",
    "MemorySender",
    "RemoteReceiver",
    "RemoteSender",
    "connect",
    "memory_channel",
    "outlast",
    "serve",
]
