"""The channels between stages, within one event loop, between processes and between hosts."""

from __future__ import annotations

from .pipeline.channels.channel import ChannelStatistics
from .pipeline.channels.keys import ChannelKey
from .pipeline.channels.memory import MemoryReceiver, MemorySender, memory_channel
from .pipeline.channels.remote_receiver import RemoteReceiver
from .pipeline.channels.remote_sender import RemoteSender
from .pipeline.channels.replaying_sender import ReplayingSender, connect_with_replay
from .pipeline.channels.transports import connect, serve

__all__ = [
    "ChannelKey",
    "ChannelStatistics",
    "MemoryReceiver",
    "MemorySender",
    "RemoteReceiver",
    "RemoteSender",
    "ReplayingSender",
    "connect",
    "connect_with_replay",
    "memory_channel",
    "serve",
]
