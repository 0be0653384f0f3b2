"""Senders of other processes and their journal, as a source."""
