"""Policies, the engines that they open, and tokenizers."""

from __future__ import annotations

from ._schemas import TokenizerIdentity, check_tokenizers, tokenizer_identity
from ._stages.engines.engine_publisher import EnginePublisher
from ._stages.engines.http_policy import HttpPolicy
from ._stages.engines.policies import Completion, Engine, GenerationIsOutside, NoOpEngine, NoOpPolicy, Policy, Tokenizer
from ._stages.engines.pretrained_tokenizer import PretrainedTokenizer
from ._stages.engines.retry import Backoff
from ._stages.engines.sampling_params import SamplingParams

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
    "SamplingParams",
    "Tokenizer",
    "TokenizerIdentity",
    "check_tokenizers",
    "tokenizer_identity",
]
