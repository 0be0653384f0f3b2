"""Policies and their engines with weights that can be updated: in torch, or at an inference server."""
