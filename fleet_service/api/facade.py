"""What the edge asks of the head and of a call, as Protocols: the whole surface between them.

fleet_service.runtime.head.Head is the head; tests bring their own. Another transport that offers a `Call`
could serve the same servicers. Everything the head refuses is a FleetError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fleet_service.domain.access import Caller
from fleet_service.domain.errors import FleetError
from fleet_service.domain.events import Event
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.runtime.views import (
    CancelResult,
    DrainInfo,
    Explanation,
    FleetChange,
    ModelSummary,
    NameInfo,
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

    @property
    def caller(self) -> Caller:
        """Who calls, and what it may do."""

    async def write(self, message: Any) -> None:
        """Send one message; waits while the transport is full. Raises once the caller has gone."""


class DuplexCall(Call, Protocol):
    """A call whose caller sends messages as well."""

    @property
    def request_id(self) -> str:
        """What the call is named in logs and errors."""

    async def read(self) -> tuple[Any, FleetError | None] | None:
        """The caller's next message, and what all its parts are refused for, if they are; None at their end.

        Raises FleetError for one that cannot be read, or when the caller may call no longer; something else
        once the caller has gone.
        """


T = TypeVar("T")


class Reader(Protocol):
    """One reader of a generation, at its own pace."""

    @property
    def branch(self) -> int:
        """That of the generation's log."""

    async def read(self) -> list[Event]:
        """All events that are new, at least one. The last one ever is Finished."""

    def close(self) -> None:
        """The reader has gone. May be called again."""


class Follower(Protocol):
    """One reader of a generation, told of news by a callback."""

    @property
    def branch(self) -> int:
        """That of the generation's log."""

    def take_some(self, most_tokens: int) -> list[Event]:
        """Events that are new, tokens only at their end but for Finished, and at most so many.

        Raises HEAD_DRAINING, of a head that ends.
        """

    def has_some(self, most_tokens: int) -> bool:
        """Whether `take_some` gives or raises anything now."""

    def close(self) -> None:
        """The reader has gone. May be called again."""


class Generation(Protocol):
    """A generation that runs or has lately finished."""

    @property
    def generation_id(self) -> str: ...

    @property
    def session_id(self) -> str: ...

    def attach(self, from_index: int = 0, branch: int = 0) -> Reader:
        """A reader from that index on; what it has is of that branch.

        Raises INDEX_OUT_OF_RANGE, DATA_LOSS.
        """

    def follow(self, from_index: int, branch: int, on_news: Callable[[], None]) -> Follower:
        """As `attach`; `on_news` is called in the step that brings something new."""


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where a reader begins: of which generation, at which index, and of which branch is what it has."""

    generation: Generation
    from_index: int = 0
    branch: int = 0


class CallersHead(Protocol):
    """The head, to callers. `owner` names who calls: sessions and generations are its own alone."""

    async def create_session(
        self, session_id: str, spec: SessionSpec, token_ids: Sequence[int], key: RequestKey | None, owner: str
    ) -> SessionView: ...

    async def told(self, read: Callable[[], T]) -> T:
        """What `read` gives, or why it refuses, once that may be told of."""

    def get_session(self, session_id: str, owner: str) -> SessionView: ...

    async def context_of(self, session_id: str, owner: str) -> Sequence[int]: ...

    def list_sessions(
        self, page_size: int, page_token: str, state: SessionState | None, node: str, owner: str
    ) -> tuple[list[SessionView], str]: ...

    async def append_tokens(
        self,
        session_id: str,
        token_ids: Sequence[int],
        expected_length: int | None,
        truncate_to: int | None,
        key: RequestKey | None,
        owner: str,
    ) -> SessionView: ...

    async def park_session(self, session_id: str, owner: str) -> SessionView: ...

    async def resume_session(self, session_id: str, owner: str) -> SessionView: ...

    async def finish_session(self, session_id: str, owner: str) -> SessionView: ...

    async def generate(
        self,
        session_id: str,
        generation_id: str,
        spec: GenerationSpec,
        key: RequestKey | None,
        trace: object | None,
        owner: str,
    ) -> Generation: ...

    async def complete(
        self,
        spec: SessionSpec,
        token_ids: Sequence[int],
        generation_spec: GenerationSpec,
        generation_id: str,
        key: RequestKey | None,
        trace: object | None,
        owner: str,
    ) -> Generation: ...

    def find_generation(self, generation_id: str, owner: str) -> Generation: ...

    async def cancel_generation(self, generation_id: str, owner: str) -> CancelResult: ...

    def list_models(self) -> list[ModelSummary]: ...


class DrainProgress(Protocol):
    """One who follows a drain."""

    async def read(self) -> tuple[str, DrainInfo]:
        """The node's name and its drain: at once, then when it has changed. The last is not DRAINING."""

    def close(self) -> None:
        """They have gone; the drain goes on. May be called again."""


class Watcher(Protocol):
    """One who watches the fleet, at their own pace."""

    async def read(self) -> FleetChange | None:
        """The whole fleet, then what has changed, when it has. None: the head ends."""

    def close(self) -> None:
        """They have gone. May be called again."""


class OperatorsHead(Protocol):
    """The head, to operators. A node is named by its name or its address."""

    @property
    def books_balance(self) -> bool: ...

    async def all_nodes(self) -> list[NodeInfo]: ...

    def list_names(self) -> list[NameInfo]: ...

    def get_node(self, ref: str) -> NodeInfo: ...

    async def probe_nodes(self, refs: Sequence[str]) -> list[ProbeResult]: ...

    async def add_node(self, address: str) -> NodeInfo: ...

    async def remove_node(self, ref: str) -> NodeInfo: ...

    async def add_name(self, entry: str) -> NameInfo: ...

    async def remove_name(self, entry: str) -> NameInfo: ...

    async def settled(self) -> None:
        """Return once what was ordered outlives the head."""

    def cordon_node(self, ref: str, note: str, by: str) -> NodeInfo: ...

    def uncordon_node(self, ref: str) -> NodeInfo: ...

    def drain_node(self, ref: str, note: str, by: str) -> DrainProgress: ...

    def watch_fleet(self, *, with_turns: bool) -> Watcher: ...

    def explain_placement(
        self, session_id: str, spec: SessionSpec | None, prompt_tokens: int
    ) -> Explanation: ...
