"""The paths of the endpoint, by method."""

from __future__ import annotations

from .anthropic_messages import ANTHROPIC_MESSAGES, COUNT_TOKENS
from .application import Routes
from .chat_completions import CHAT_COMPLETIONS
from .clients import CLIENTS
from .openai_responses import RESPONSES
from .rewards import REWARD
from .text_completions import TEXT_COMPLETIONS
from .token_routes import GENERATE, HEALTH, MODELS, PLAIN_GENERATE, TOKENIZE

ROUTES: Routes = {
    ("GET", "/health"): HEALTH,
    ("GET", "/v1/models"): MODELS,
    ("POST", "/generate"): PLAIN_GENERATE,
    ("POST", "/inference/v1/generate"): GENERATE,
    ("POST", "/tokenize"): TOKENIZE,
    ("POST", "/v1/chat/completions"): CHAT_COMPLETIONS,
    ("POST", "/v1/clients"): CLIENTS,
    ("POST", "/v1/completions"): TEXT_COMPLETIONS,
    ("POST", "/v1/messages"): ANTHROPIC_MESSAGES,
    ("POST", "/v1/messages/count_tokens"): COUNT_TOKENS,
    ("POST", "/v1/responses"): RESPONSES,
    ("POST", "/v1/reward"): REWARD,
}
