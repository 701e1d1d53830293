"""What may join a context: how many tokens there may be, and which."""

from __future__ import annotations

from collections.abc import Sequence

from fleet_service.domain.errors import FleetError, Reason, invalid
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.session import Session
from fleet_service.runtime.settings import HeadSettings


class ContextLimits:
    """The limits of the head's settings and of its nodes' models."""

    def __init__(self, fleet: Fleet, settings: HeadSettings) -> None:
        self._fleet = fleet
        self._settings = settings

    def check_length(self, all_contexts: int, kept: int, added: int) -> None:
        """`added` tokens behind `kept`, where all contexts together have so many. Raises LIMIT_EXCEEDED."""
        total, limit = all_contexts + added, self._settings.max_total_context_tokens
        if added and total > limit:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"the sessions' contexts would have {total} tokens in all, more than the {limit} kept",
                metadata={"limit": "max_total_context_tokens", "value": str(limit), "tokens": str(total)},
                retry_after_s=1.0,
            )
        tokens, limit = kept + added, self._settings.max_context_tokens
        if tokens > limit:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"a context of {tokens} tokens is longer than the {limit} the head keeps",
                metadata={"limit": "max_context_tokens", "value": str(limit), "tokens": str(tokens)},
            )

    def check_vocabulary(self, model: str, token_ids: Sequence[int]) -> None:
        """Raises INVALID_FIELD for a token that the model, as far as nodes tell of it, does not have."""
        size = self._fleet.vocabulary(model)
        if size and token_ids and max(token_ids) >= size:
            raise invalid("token_ids", f"must be below {size}, the size of the vocabulary of model {model}")

    def check_windows(self, session: Session, tokens: int) -> None:
        """Raises CONTEXT_TOO_LONG when no node's window takes a context of so many tokens."""
        demand = self._fleet.session_demand(session, tokens=tokens)
        too_long = self._fleet.too_long(demand) if self._fleet.serving(session.spec.model) else None
        if too_long is not None:
            raise too_long
