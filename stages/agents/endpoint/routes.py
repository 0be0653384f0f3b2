"""The paths of the endpoint, by method."""

from __future__ import annotations

from .application import Routes
from .chat_completions import CHAT_COMPLETIONS

ROUTES: Routes = {
    ("POST", "/v1/chat/completions"): CHAT_COMPLETIONS,
}
