"""The channels between stages, within one event loop, between processes and between hosts."""

from __future__ import annotations

from ._pipeline.channels.channel import ChannelStatistics
from ._pipeline.channels.keys import ChannelKey
from ._pipeline.channels.memory import MemoryReceiver, MemorySender, memory_channel
from ._pipeline.channels.remote_receiver import RemoteReceiver
from ._pipeline.channels.remote_sender import RemoteSender
from ._pipeline.channels.replaying_sender import ReplayingSender, connect_with_replay
from ._pipeline.channels.transports import connect, serve
from ._pipeline.graph.flush import FlushableInbox

__all__ = [
    "ChannelKey",
    "ChannelStatistics",
    "FlushableInbox",
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
