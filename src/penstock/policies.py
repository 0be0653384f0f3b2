"""Policies, the engines that they open, and tokenizers."""

from __future__ import annotations

from ._schemas import TokenizerIdentity, check_tokenizers, tokenizer_identity
from ._stages.contracts.engine_publisher import EnginePublisher
from ._stages.contracts.policies import (
    Completion,
    Engine,
    GenerationIsOutside,
    NoOpEngine,
    NoOpPolicy,
    Policy,
    Tokenizer,
)
from ._stages.contracts.routed_experts import RoutedExperts
from ._stages.contracts.sampling_params import SamplingParams
from ._stages.engines.http_policy import HttpPolicy
from ._stages.http.retry import Backoff
from ._stages.tokenizers.pretrained_tokenizer import PretrainedTokenizer

__all__ = [
    "Backoff",
    "Completion",
    "Engine",
    "EnginePublisher",
    "GenerationIsOutside",
    "HttpPolicy",
    "NoOpEngine",
    "NoOpPolicy",
    "Policy",
    "PretrainedTokenizer",
    "RoutedExperts",
    "SamplingParams",
    "Tokenizer",
    "TokenizerIdentity",
    "check_tokenizers",
    "tokenizer_identity",
]
