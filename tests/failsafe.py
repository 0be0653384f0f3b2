"""The time after which a test gives up waiting."""

from __future__ import annotations

__all__ = ["FAILSAFE_S"]

FAILSAFE_S = 240.0
"""Seconds that a test waits for an event that takes milliseconds on an idle machine.

It decides no test: it ends one that hangs, at the line that waits, before pytest's own timeout does. Two cores that
also run four busy processes and other tests are about twenty times slower, and some tests wait for a whole run.
"""
