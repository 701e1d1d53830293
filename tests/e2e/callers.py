"""What callers do, in the tests' words: open, generate, read, and check the order readers may rely on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.types_pb2 import FinishReason
from tests.e2e.harness import MODEL, PATIENCE_S, HeadServer, NodeProcess


@dataclass
class Answer:
    """A stream as its reader saw it."""

    events: list[pb.GenerationEvent] = field(default_factory=list)

    def take(self, event: pb.GenerationEvent) -> None:
        """Check the order that every reader may rely on, event by event."""
        kind = event.WhichOneof("event")
        assert kind is not None
        assert not self.finishes, "an event came after the terminal one"
        assert bool(self.events) == (kind != "accepted"), "accepted is the first event, once"
        if kind == "tokens" and self.first_index is not None:
            assert event.tokens.first_index == self.first_index + len(self.tokens), "a gap or a repeat"
        self.events.append(event)

    def _of(self, kind: str) -> list[pb.GenerationEvent]:
        return [event for event in self.events if event.WhichOneof("event") == kind]

    @property
    def generation_id(self) -> str:
        return self.events[0].accepted.generation_id

    @property
    def first_index(self) -> int | None:
        batches = self._of("tokens")
        return batches[0].tokens.first_index if batches else None

    @property
    def tokens(self) -> list[int]:
        return [token for event in self._of("tokens") for token in event.tokens.token_ids]

    @property
    def started(self) -> list[pb.Started]:
        return [event.started for event in self._of("started")]

    @property
    def moves(self) -> list[pb.Moved]:
        return [event.moved for event in self._of("moved")]

    @property
    def finishes(self) -> list[pb.Finished]:
        return [event.finished for event in self._of("finished")]

    @property
    def finished(self) -> pb.Finished:
        (finished,) = self.finishes
        return finished

    @property
    def reason(self) -> str:
        return pb_reason(self.finished)


def pb_reason(finished: pb.Finished) -> str:
    """The finish's name, e.g. LENGTH."""
    return FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_")


async def events_of(call: object) -> AsyncIterator[pb.GenerationEvent]:
    """The events of a Generate, Complete or AttachGeneration call."""
    async for response in call:  # type: ignore[attr-defined]
        yield response.event


async def read_all(call: object, on_event: Callable[[Answer], object] | None = None) -> Answer:
    """The whole stream; `on_event` may look, or act, after each event (a coroutine is awaited)."""
    answer = Answer()
    async with asyncio.timeout(PATIENCE_S * 2):
        async for event in events_of(call):
            answer.take(event)
            if on_event is not None:
                result = on_event(answer)
                if asyncio.iscoroutine(result):
                    await result
    assert len(answer.finishes) == 1
    return answer


def complete(
    server: HeadServer, token_ids: Sequence[int], n: int, model: str = MODEL.name, **spec: object
) -> object:
    """A Complete call for `n` tokens; `spec` are fields of GenerationSpec."""
    generation = pb.GenerationSpec(max_new_tokens=n, **spec)  # type: ignore[arg-type]
    request = pb.CompleteRequest(session=pb.SessionSpec(model=model), token_ids=token_ids, spec=generation)
    return server.fleet.Complete(request)


async def open_session(
    server: HeadServer, token_ids: Sequence[int] = (), model: str = MODEL.name, **fields: object
) -> str:
    """A session's id; `fields` are those of SessionSpec."""
    spec = pb.SessionSpec(model=model, **fields)  # type: ignore[arg-type]
    answer = await server.fleet.CreateSession(pb.CreateSessionRequest(spec=spec, token_ids=token_ids))
    return answer.session.session_id


def generate(server: HeadServer, session_id: str, n: int, generation_id: str = "", **spec: object) -> object:
    """A Generate call for `n` tokens; `spec` are fields of GenerationSpec."""
    generation = pb.GenerationSpec(max_new_tokens=n, **spec)  # type: ignore[arg-type]
    request = pb.GenerateRequest(session_id=session_id, generation_id=generation_id, spec=generation)
    return server.fleet.Generate(request)


async def cordon(server: HeadServer, *nodes: NodeProcess) -> None:
    """Let the nodes take no new work."""
    for node in nodes:
        await server.admin.CordonNode(admin_pb.CordonNodeRequest(node=node.identity))


async def uncordon(server: HeadServer, *nodes: NodeProcess) -> None:
    for node in nodes:
        await server.admin.UncordonNode(admin_pb.UncordonNodeRequest(node=node.identity))


async def open_session_on(
    server: HeadServer,
    node: NodeProcess,
    token_ids: Sequence[int] = (),
    session_id: str = "",
    model: str = MODEL.name,
) -> str:
    """A session placed on `node`, the others being cordoned meanwhile; its id."""
    others = [each for each in server.head.fleet.nodes if each.name != node.identity and not each.cordoned]
    for other in others:
        await server.admin.CordonNode(admin_pb.CordonNodeRequest(node=other.name))
    request = pb.CreateSessionRequest(
        session_id=session_id, spec=pb.SessionSpec(model=model), token_ids=token_ids
    )
    answer = await server.fleet.CreateSession(request)
    for other in others:
        await server.admin.UncordonNode(admin_pb.UncordonNodeRequest(node=other.name))
    assert answer.session.node == node.identity
    return answer.session.session_id


async def context_of(server: HeadServer, session_id: str) -> list[int]:
    """The session's context as the head tells it."""
    request = pb.GetSessionRequest(session_id=session_id, include_token_ids=True)
    return list((await server.fleet.GetSession(request)).token_ids)


class Reading:
    """A stream that is read in the background, so that a test can act at a chosen moment of it."""

    def __init__(self, call: object) -> None:
        self.answer = Answer()
        self._call = call
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read(), name="reading")

    async def _read(self) -> None:
        try:
            async for event in events_of(self._call):
                self.answer.take(event)
                self._news.set()
        finally:
            self._news.set()

    async def until(self, condition: Callable[[Answer], object]) -> Answer:
        """Wait until what was read so far fulfils `condition`."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition(self.answer):
                if self._task.done():
                    self._task.result()
                    raise AssertionError(f"the stream ended first: {self.answer.events[-1:]}")
                self._news.clear()
                await self._news.wait()
        return self.answer

    async def until_tokens(self, count: int) -> Answer:
        return await self.until(lambda answer: len(answer.tokens) >= count)

    async def end(self) -> Answer:
        """The whole answer; raises what ended the stream otherwise."""
        async with asyncio.timeout(PATIENCE_S * 2):
            await self._task
        assert len(self.answer.finishes) == 1
        return self.answer

    async def leave(self) -> Answer:
        """Go away, as a caller that hangs up; what had come by then."""
        self._call.cancel()  # type: ignore[attr-defined]
        await asyncio.wait({self._task})
        return self.answer
