"""Atropos: its environments as sources, its trainers as sinks."""

from .transport import ShmTransport

__all__ = ["ShmTransport"]
