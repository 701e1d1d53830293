"""What the edge asks of the head and of a call, as Protocols: the whole surface between them.

fleet_service.runtime.head.Head is the head; tests bring their own. Another transport that offers a `Call`
could serve the same servicers. Everything the head refuses is a FleetError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fleet_service.domain.events import Event
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.runtime.views import (
    CancelResult,
    Explanation,
    ModelSummary,
    NodeInfo,
    ProbeResult,
    RequestKey,
    SessionView,
)


class Call(Protocol):
    """What a method uses of the call it answers."""

    @property
    def trace(self) -> object | None:
        """The call's trace, for the head to hang its own on; opaque here."""

    async def write(self, message: Any) -> None:
        """Send one message; waits while the transport is full. Raises once the caller has gone."""


class Reader(Protocol):
    """One reader of a generation, at its own pace."""

    async def read(self) -> list[Event]:
        """All events that are new, at least one. The last one ever is Finished."""

    def close(self) -> None:
        """The reader has gone. May be called again."""


class Generation(Protocol):
    """A generation that runs or has lately finished."""

    @property
    def generation_id(self) -> str: ...

    @property
    def session_id(self) -> str: ...

    def attach(self, from_index: int = 0) -> Reader:
        """A reader from that index on. Raises INDEX_OUT_OF_RANGE."""


class CallersHead(Protocol):
    """The head, to callers."""

    async def create_session(
        self, session_id: str, spec: SessionSpec, token_ids: Sequence[int], key: RequestKey | None
    ) -> SessionView: ...

    def get_session(self, session_id: str) -> SessionView: ...

    def context_of(self, session_id: str) -> Sequence[int]: ...

    def list_sessions(
        self, page_size: int, page_token: str, state: SessionState | None, node: str
    ) -> tuple[list[SessionView], str]: ...

    async def append_tokens(
        self,
        session_id: str,
        token_ids: Sequence[int],
        expected_length: int | None,
        truncate_to: int | None,
        key: RequestKey | None,
    ) -> SessionView: ...

    async def park_session(self, session_id: str) -> SessionView: ...

    async def resume_session(self, session_id: str) -> SessionView: ...

    async def finish_session(self, session_id: str) -> SessionView: ...

    async def generate(
        self,
        session_id: str,
        generation_id: str,
        spec: GenerationSpec,
        key: RequestKey | None,
        trace: object | None,
    ) -> Generation: ...

    async def complete(
        self,
        spec: SessionSpec,
        token_ids: Sequence[int],
        generation_spec: GenerationSpec,
        generation_id: str,
        key: RequestKey | None,
        trace: object | None,
    ) -> Generation: ...

    def find_generation(self, generation_id: str) -> Generation: ...

    async def cancel_generation(self, generation_id: str) -> CancelResult: ...

    def list_models(self) -> list[ModelSummary]: ...


class OperatorsHead(Protocol):
    """The head, to operators. A node is named by its name or its address."""

    @property
    def books_balance(self) -> bool: ...

    def list_nodes(self) -> list[NodeInfo]: ...

    def get_node(self, ref: str) -> NodeInfo: ...

    async def probe_nodes(self, refs: Sequence[str]) -> list[ProbeResult]: ...

    async def add_node(self, address: str) -> NodeInfo: ...

    async def remove_node(self, ref: str) -> NodeInfo: ...

    def cordon_node(self, ref: str, note: str) -> NodeInfo: ...

    def uncordon_node(self, ref: str) -> NodeInfo: ...

    def explain_placement(
        self, session_id: str, spec: SessionSpec | None, prompt_tokens: int
    ) -> Explanation: ...
