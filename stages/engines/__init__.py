"""Policies and their engines, whose weights can be updated: in torch, or at an inference server."""
