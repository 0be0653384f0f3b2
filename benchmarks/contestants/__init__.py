"""The contestants: each moves the same groups from producer processes into packed batches.

One file for each contestant. Requirements are imported when it runs; `Absent` names the packages to install.
"""

from __future__ import annotations

from collections.abc import Callable

from .arrow import arrow
from .faster_fifo import faster_fifo
from .harness import Absent, Case, Outcome, leaving_nothing
from .http_json import http_gzip, http_keepalive
from .iceoryx2 import iceoryx2_event, iceoryx2_spin
from .mp_queue import mp_queue
from .penstock import penstock, penstock_tcp
from .pickle_ring import pickle_ring
from .ray import ray_actor, ray_graph, ray_queue
from .redis_streams import redis_streams
from .torch_queue import torch_queue
from .zmq_copies import zmq_msgpack, zmq_multipart, zmq_tcp

__all__ = ["CONTESTANTS", "Absent", "Case", "Outcome", "leaving_nothing"]

CONTESTANTS: dict[str, Callable[[Case], Outcome]] = {
    "penstock": penstock,
    "penstock-tcp": penstock_tcp,
    "iceoryx2-spin": iceoryx2_spin,
    "iceoryx2-event": iceoryx2_event,
    "zmq-multipart": zmq_multipart,
    "zmq-msgpack": zmq_msgpack,
    "zmq-tcp": zmq_tcp,
    "arrow-ipc": arrow,
    "pickle-ring": pickle_ring,
    "faster-fifo": faster_fifo,
    "mp-queue": mp_queue,
    "torch-mp": torch_queue,
    "ray-graph": ray_graph,
    "ray-actor": ray_actor,
    "ray-queue": ray_queue,
    "redis": redis_streams,
    "http": http_keepalive,
    "http-gzip": http_gzip,
}
