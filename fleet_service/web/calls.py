"""The page's calls: methods of AdminService, by the very servicer that gRPC uses, and a few of its own.

A request is the method's message as JSON, and so is the reply; a stream comes as server-sent events.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import Message

from fleet.v1 import admin_service_pb2 as admin
from fleet_service.api.access import needed
from fleet_service.api.admin_servicer import AdminServicer
from fleet_service.domain.access import Caller, Permission
from fleet_service.domain.errors import FleetError, Reason, invalid
from fleet_service.domain.session_table import SessionState
from fleet_service.http_server import Exchange
from fleet_service.runtime.views import SessionView
from fleet_service.web.convert import Json, event_json, message_json, session_json, story_json, unix_ms
from fleet_service.web.door import ADMIN
from fleet_service.web.stories import Stories, Story

MAX_STREAMS = 32
MAX_SESSIONS = 100
"""Listed at once; who looks for another one says more of it."""

MAX_STORIES = 20
"""Generations told of one session, the last ones."""

MAX_EVENTS = 60
"""Told of what was before the page was opened."""

PACE_S = 0.3
"""Least time between two messages of a stream: what changes meanwhile comes together."""

PAUSE_FACTOR = 9.0
"""A stream rests so many times as long as a message took to write: a page costs the head a tenth at most."""

_MAX_TEXT = 256
_NODES_PER_EVENT = 50
_SERVICE = admin.DESCRIPTOR.services_by_name["AdminService"]
ADMIN_METHODS = ("CordonNode", "DrainNode", "ExplainPlacement", "UncordonNode", "WatchFleet")
OWN_METHODS = ("GetAbout", "GetStory", "ListEvents", "ListSessions")


class Sessions(Protocol):
    """What is asked of the head's sessions."""

    def lately_used(
        self, count: int, state: SessionState | None, node: str, text: str
    ) -> list[SessionView]: ...


class _Enough(Exception):
    """A stream was only wanted for its first message."""


@dataclass(slots=True)
class _Call:
    """What the servicer uses of a call (api.facade.Call)."""

    exchange: Exchange
    caller: Caller
    once: bool
    clock: Callable[[], float]
    trace: object | None = None
    first: Message | None = None

    async def write(self, message: Message) -> None:
        if self.once:
            self.first = message
            raise _Enough
        if not self.exchange.streams:
            await self.exchange.stream("text/event-stream", b":\n\n")
        took_s = 0.0
        for part in _parts(message):
            began_s = self.clock()
            data = event(message_json(part))
            took_s += self.clock() - began_s
            await self.exchange.write(data)
            await asyncio.sleep(0)
        await asyncio.sleep(max(PACE_S, PAUSE_FACTOR * took_s))


class Calls:
    """Answers calls of admitted callers. `about` tells of the head; `clock` gives unix seconds.

    Made in the loop it runs on.
    """

    def __init__(
        self,
        servicer: AdminServicer,
        sessions: Sessions,
        stories: Stories,
        about: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        self._servicer = servicer
        self._sessions = sessions
        self._stories = stories
        self._about = about
        self._clock = clock
        self._monotonic = asyncio.get_running_loop().time
        self._streams = 0
        self._own: Mapping[str, Callable[[Json, Caller], Json]] = {
            "GetAbout": self._get_about,
            "GetStory": self._get_story,
            "ListEvents": self._list_events,
            "ListSessions": self._list_sessions,
        }

    async def call(self, method: str, body: Json, exchange: Exchange, caller: Caller) -> Json | None:
        """The reply; None when it was streamed. Raises FleetError."""
        own = self._own.get(method)
        if own is not None:
            return own(body, caller)
        if method == "WatchFleet":
            await self._watch(body, exchange, caller)
            return None
        call = _Call(exchange, caller, once=True, clock=self._monotonic)
        try:
            reply = await getattr(self._servicer, method)(_message(method, body), call)
        except _Enough:
            reply = call.first
        return message_json(reply)

    async def _watch(self, body: Json, exchange: Exchange, caller: Caller) -> None:
        if self._streams >= MAX_STREAMS:
            raise FleetError(
                Reason.LIMIT_EXCEEDED,
                f"{MAX_STREAMS} pages watch the fleet, the most there may be; close one",
                metadata={"limit": "page_streams", "value": str(MAX_STREAMS)},
            )
        self._streams += 1
        try:
            request: Any = _message("WatchFleet", body)
            call = _Call(exchange, caller, once=False, clock=self._monotonic)
            await self._servicer.WatchFleet(request, call)
        finally:
            self._streams -= 1

    # The page's own

    def _get_about(self, body: Json, caller: Caller) -> Json:
        _fields(body)
        may_operate = Permission.OPERATE in caller.may
        return {**self._about, "caller": caller.name, "may_operate": may_operate, "now_ms": self._now_ms()}

    def _list_sessions(self, body: Json, caller: Caller) -> Json:
        text, node, state = _fields(body, "text", "node", "state")
        by_name = {each.name: each for each in SessionState}
        if state and state not in by_name:
            raise invalid("state", f"must be one of {', '.join(by_name)}")
        views = self._sessions.lately_used(MAX_SESSIONS, by_name.get(state), node, text)
        return {"sessions": [session_json(view) for view in views], "now_ms": self._now_ms()}

    def _list_events(self, body: Json, caller: Caller) -> Json:
        _fields(body)
        return {"events": [event_json(*turn) for turn in self._stories.lately(MAX_EVENTS)]}

    def _get_story(self, body: Json, caller: Caller) -> Json:
        session_id, generation_id = _fields(body, "session_id", "generation_id")
        found: list[Story] = []
        if generation_id:
            story = self._stories.of_generation(generation_id)
            found = [story] if story is not None else []
        elif session_id:
            found = self._stories.of_session(session_id)
        else:
            raise invalid("session_id", "give a session_id or a generation_id")
        told = [story_json(story) for story in found[-MAX_STORIES:]]
        return {"generations": told, "left_out": len(found) - len(told), "now_ms": self._now_ms()}

    def _now_ms(self) -> int:
        return unix_ms(self._clock())


def is_change(method: str) -> bool:
    return needed(ADMIN + method) is Permission.OPERATE


def parsed(data: bytes) -> Json:
    """A call's body. Raises INVALID_FIELD."""
    try:
        body = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        raise invalid("request", "is no JSON") from None
    if not isinstance(body, dict):
        raise invalid("request", "must be a JSON object")
    return body


def event(value: Json) -> bytes:
    """One server-sent event; JSON has no line ends of its own."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _message(method: str, body: Json) -> Message:
    message: Message = getattr(admin, _SERVICE.methods_by_name[method].input_type.name)()
    try:
        ParseDict(body, message)
    except (ParseError, RecursionError) as error:
        raise invalid("request", f"is not what {method} takes: {error}") from None
    return message


def _fields(body: Json, *names: str) -> list[str]:
    """The texts of that name, "" where there is none. Raises INVALID_FIELD."""
    if unknown := sorted(body.keys() - set(names)):
        raise invalid(unknown[0][:_MAX_TEXT], "is no field of this request")
    values = [body.get(name, "") for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str) or len(value) > _MAX_TEXT:
            raise invalid(name, f"must be a text of at most {_MAX_TEXT} characters")
    return values


def _parts(message: Message) -> Iterator[Message]:
    """The message, in several when it has many nodes: converting them all at once would hold up the head."""
    if not isinstance(message, admin.WatchFleetResponse) or len(message.nodes) <= _NODES_PER_EVENT:
        yield message
        return
    nodes = list(message.nodes)
    del message.nodes[_NODES_PER_EVENT:]
    yield message
    for start in range(_NODES_PER_EVENT, len(nodes), _NODES_PER_EVENT):
        yield admin.WatchFleetResponse(nodes=nodes[start : start + _NODES_PER_EVENT])
