"""Stands in for openai's module of this name where that is not installed."""

from types import SimpleNamespace


class Completion(SimpleNamespace): ...


class CompletionChoice(SimpleNamespace): ...
