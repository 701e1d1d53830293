"""A head as the checks use it: one for each rule, with sessions and a lease of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import node_service_pb2_grpc, types_pb2
from fleet_service.conformance.requests import crc32, epoch_of, greedy, refusal_text
from fleet_service.conformance.stream import Stream, has_tokens
from fleet_service.conformance.verdicts import Broken, Skipped, Untried
from fleet_service.token import FleetToken

LEASE_MS = 60_000
PROTOCOL_VERSION = 1
DEFAULT_MESSAGE_BYTES = 16 * 1024 * 1024
# Terms of heads in service are seconds of the wall clock: a node that has seen ours bars none of theirs.
TERM = 1
NEXT_TERM = 2
_LONG_RUN_TOKENS = 100_000
_SHORT_LEASES_MS = (400, 1_600, 6_400)

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class Connection:
    """A way to the node, and what was learned there. `proof` goes with every call."""

    channel: grpc.aio.Channel
    fleet_id: str
    hello: pb.HandshakeResponse
    model: types_pb2.Model
    token: FleetToken | None
    proof: Metadata

    def has(self, feature: admin_pb.NodeFeature) -> bool:
        return feature in self.hello.features

    def need(self, feature: admin_pb.NodeFeature) -> None:
        """Raise Skipped where the node does not announce it."""
        if not self.has(feature):
            name = admin_pb.NodeFeature.Name(feature).removeprefix("NODE_FEATURE_")
            raise Skipped(f"it does not announce {name}")

    @property
    def window(self) -> int:
        """Of the model, in tokens; 0 = unknown."""
        return self.model.max_context_tokens

    def tokens(self, count: int, start: int = 0) -> list[int]:
        """Valid ids, none of which ends a generation; others for another `start`."""
        vocabulary = self.model.vocab_size or 256
        ends = set(self.model.eos_token_ids)
        found: list[int] = []
        n = start * 97
        while len(found) < count:
            n += 1
            token = (n * 31 + 7) % vocabulary
            if token not in ends or len(ends) >= vocabulary:
                found.append(token)
        return found


Connect = Callable[[], AbstractAsyncContextManager[Connection]]
"""Opens a further connection, with a handshake of its own. Raises Broken."""


class Head:
    """Speaks to the node under a name of its own. `connect` opens a further connection to it."""

    def __init__(self, connection: Connection, name: str, connect: Connect) -> None:
        self.connection = connection
        self.name = name
        self._connect = connect
        self.doing = "waiting for the node"
        """What it waits for, should its time run out."""
        self.is_preparing = False
        self.stub: Any = node_service_pb2_grpc.NodeServiceStub(connection.channel)
        self._sessions: list[Session] = []
        self._terms = {TERM}
        self._calls: list[Any] = []

    @asynccontextmanager
    async def again(self) -> AsyncIterator[Head]:
        """The same head over a connection of its own, closed at the end. Raises Broken."""
        self.doing = "waiting for a second connection"
        async with self._connect() as connection:
            other = Head(connection, self.name, self._connect)
            other._sessions, other._terms = self._sessions, self._terms  # to be cleaned up here
            yield other

    # ------------------------------------------------------------------------------------------ any call

    async def call(self, method: str, request: Any) -> Any:
        """The answer of a unary call. Raises Broken for a call that failed: every command is answered."""
        self.doing = f"waiting for the answer to {method}"
        try:
            return await getattr(self.stub, method)(request, metadata=self.connection.proof)
        except grpc.aio.AioRpcError as error:
            raise Broken(f"{method} ended with {status_text(error)} in place of an answer") from error

    def generate(self, request: pb.NodeServiceGenerateRequest) -> Stream:
        self.doing = "waiting for the next message of Generate"
        return Stream(self._kept(self.stub.Generate(request, metadata=self.connection.proof)))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """What is done within is not what the rule is about: where it fails, the rule is untried."""
        self.is_preparing = True
        try:
            yield
        except Broken as broken:
            raise Untried(str(broken)) from broken
        self.is_preparing = False

    # ------------------------------------------------------------------------------------------ sessions

    def session(self, term: int = TERM) -> Session:
        """A session of which the node knows nothing yet."""
        session = Session(self, f"{self.name}-s{len(self._sessions) + 1}", term)
        self._sessions.append(session)
        self._terms.add(term)
        return session

    async def bound(
        self, context: Sequence[int] | None = None, *, term: int = TERM, lease_ms: int = LEASE_MS
    ) -> Session:
        """A session that the node holds with a context. Raises Untried."""
        session = self.session(term)
        with self.preparing():
            await session.bind(self.connection.tokens(8) if context is None else context, lease_ms)
        return session

    async def running(self, session: Session, generation_id: str = "long") -> Stream:
        """A generation of which tokens have come and many are left. Raises Untried, Skipped."""
        with self.preparing():
            stream = session.generate(self.long_run(session), generation_id=generation_id)
            if not await stream.until(has_tokens):
                raise Untried(stream.end)
            if stream.finish:
                raise Skipped(f"its generations are over at once: {stream.end}")
        return stream

    def long_run(self, session: Session) -> int:
        """More tokens than a generation makes in any hurry."""
        window = self.connection.window
        return min(_LONG_RUN_TOKENS, window - len(session.context)) if window else _LONG_RUN_TOKENS

    async def short_lease(self, term: int = TERM) -> tuple[Session, float]:
        """A session bound under a lease that ends soon, and that lease in seconds. Raises Untried."""
        for lease_ms in _SHORT_LEASES_MS:
            session = self.session(term)
            try:
                await session.bind(self.connection.tokens(8), lease_ms)
            except Broken as broken:
                # A machine that was too slow for this one may do for the next.
                if "FENCED" not in str(broken) or lease_ms == _SHORT_LEASES_MS[-1]:
                    raise Untried(str(broken)) from broken
                continue
            return session, lease_ms / 1000
        raise AssertionError("the last lease returns or raises")

    async def past(self, lease_s: float) -> None:
        """Let a lease run out."""
        self.doing = "letting a lease run out"
        await asyncio.sleep(lease_s * 1.25 + 0.05)

    async def renew(self, lease_ms: int, term: int = TERM) -> pb.RenewLeaseResponse:
        """RenewLease, of a term of this head."""
        request = pb.RenewLeaseRequest(
            fleet_id=self.connection.fleet_id, head_id=self.name, term=term, lease_ms=lease_ms
        )
        answer: pb.RenewLeaseResponse = await self.call("RenewLease", request)
        return answer

    def reports(self, period_ms: int, head_id: str = "") -> Any:
        """An open WatchStatus; of this head, where no other is named."""
        self.doing = "waiting for a report"
        request = pb.WatchStatusRequest(
            period_ms=period_ms,
            fleet_id=self.connection.fleet_id,
            head_id=head_id or self.name,
            term=TERM,
        )
        return self._kept(self.stub.WatchStatus(request, metadata=self.connection.proof))

    async def report(self, call: Any) -> pb.WatchStatusResponse:
        """The next report of it."""
        try:
            message = await call.read()
        except grpc.aio.AioRpcError as error:
            raise Broken(f"WatchStatus ended with {status_text(error)}") from error
        if not isinstance(message, pb.WatchStatusResponse):
            raise Broken("WatchStatus ended by itself")
        return message

    async def handshake(self, **fields: Any) -> pb.HandshakeResponse:
        """A further Handshake. Raises AioRpcError."""
        token = self.connection.token
        about: Mapping[str, Any] = {
            "min_version": PROTOCOL_VERSION,
            "max_version": PROTOCOL_VERSION,
            "fleet_id": self.connection.fleet_id,
            "head_id": self.name,
            "term": TERM,
            "nonce": token.new_nonce() if token else b"",
        }
        self.doing = "waiting for the answer to Handshake"
        answer: pb.HandshakeResponse = await self.stub.Handshake(pb.HandshakeRequest(**{**about, **fields}))
        return answer

    def _kept(self, call: Any) -> Any:
        self._calls.append(call)
        return call

    async def clean_up(self) -> None:
        """End all calls, revoke every session and end every lease. A node that is gone has neither."""
        for call in self._calls:
            call.cancel()
        for session in self._sessions:
            request = pb.RevokeRequest(session_id=session.session_id, epoch=session.highest_epoch)
            with suppress(grpc.aio.AioRpcError):
                await self.stub.Revoke(request, metadata=self.connection.proof)
        for term in self._terms:
            with suppress(Broken):
                await self.renew(0, term)


class Session:
    """One session of a check: what the node should hold of it, and requests that say so by default."""

    def __init__(self, head: Head, session_id: str, term: int) -> None:
        self.session_id = session_id
        self.epoch = epoch_of(term, 1)
        self.highest_epoch = self.epoch
        self.context: list[int] = []
        self._head = head
        self._last_id = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    @property
    def last_id(self) -> int:
        return self._last_id

    def assign_request(self, **fields: Any) -> pb.AssignRequest:
        connection = self._head.connection
        about: dict[str, Any] = {
            "session_id": self.session_id,
            "epoch": self.epoch,
            "fleet_id": connection.fleet_id,
            "head_id": self._head.name,
            "model": connection.model.name,
            "model_revision": connection.model.revision,
            "sampling": greedy(),
            "qos_class": types_pb2.QOS_CLASS_BACKGROUND,
            "lease_ms": LEASE_MS,
        }
        command_id = fields.pop("command_id", None) or self.next_id()
        request = pb.AssignRequest(command_id=command_id, **(about | fields))
        self.highest_epoch = max(self.highest_epoch, request.epoch)
        return request

    def append_request(self, token_ids: Sequence[int], **fields: Any) -> pb.AppendRequest:
        about: dict[str, Any] = {
            "session_id": self.session_id,
            "epoch": self.epoch,
            "base_length": len(self.context),
        }
        command_id = fields.pop("command_id", None) or self.next_id()
        return pb.AppendRequest(command_id=command_id, token_ids=token_ids, **(about | fields))

    def generate_request(self, max_new_tokens: int, **fields: Any) -> pb.NodeServiceGenerateRequest:
        command_id = fields.pop("command_id", None) or self.next_id()
        about: dict[str, Any] = {
            "session_id": self.session_id,
            "epoch": self.epoch,
            "generation_id": f"g{command_id}",
            "context_length": len(self.context),
            "context_crc32": crc32(self.context),
            "max_new_tokens": max_new_tokens,
            "max_wall_ms": 600_000,
            "sampling": greedy(),
            "qos_class": types_pb2.QOS_CLASS_BACKGROUND,
        }
        return pb.NodeServiceGenerateRequest(command_id=command_id, **(about | fields))

    async def assign(self, **fields: Any) -> pb.Refusal:
        """Its refusal, empty when done."""
        answer = await self._head.call("Assign", self.assign_request(**fields))
        refusal: pb.Refusal = answer.refusal
        return refusal

    async def append(self, token_ids: Sequence[int], **fields: Any) -> pb.AppendResponse:
        request = self.append_request(token_ids, **fields)
        answer: pb.AppendResponse = await self._head.call("Append", request)
        if not answer.HasField("refusal"):
            self.context = [*self.context[: request.base_length], *token_ids]
        return answer

    def generate(self, max_new_tokens: int, **fields: Any) -> Stream:
        return self._head.generate(self.generate_request(max_new_tokens, **fields))

    async def cancel(self, generation_id: str, **fields: Any) -> pb.CancelResponse:
        about: dict[str, Any] = {
            "session_id": self.session_id,
            "epoch": self.epoch,
            "generation_id": generation_id,
        }
        answer: pb.CancelResponse = await self._head.call("Cancel", pb.CancelRequest(**(about | fields)))
        return answer

    async def revoke(self, epoch: int | None = None) -> pb.Refusal:
        request = pb.RevokeRequest(session_id=self.session_id, epoch=self.epoch if epoch is None else epoch)
        answer = await self._head.call("Revoke", request)
        refusal: pb.Refusal = answer.refusal
        return refusal

    async def bind(self, context: Sequence[int], lease_ms: int = LEASE_MS) -> None:
        """Assign, and append the context. Raises Broken."""
        if (refusal := await self.assign(lease_ms=lease_ms)).code:
            raise Broken(f"Assign of a new session: {refusal_text(refusal)}")
        self.context = []
        answer = await self.append(context)
        if answer.HasField("refusal"):
            raise Broken(f"Append to a new session: {refusal_text(answer.refusal)}")

    async def holds(self, context: Sequence[int]) -> bool:
        """Whether the node generates on exactly that context. Raises Untried where it cannot be told."""
        request = self.generate_request(1, context_length=len(context), context_crc32=crc32(context))
        stream = await self._head.generate(request).to_end()
        if stream.refusal == pb.REFUSAL_CODE_CONTEXT_MISMATCH:
            return False
        if not stream.finish:
            raise Untried(f"a generation of one token: {stream.end}")
        return True

    async def is_empty(self) -> bool:
        """Whether the node's context is empty: it refuses to keep one token of it. Raises Untried."""
        answer = await self.append([], base_length=1)
        if answer.HasField("refusal") and answer.refusal.code != pb.REFUSAL_CODE_CONTEXT_MISMATCH:
            raise Untried(f"Append: {refusal_text(answer.refusal)}")
        return answer.HasField("refusal") and answer.refusal.context_length == 0

    def move(self, n: int, term: int = TERM) -> None:
        """Speak under another epoch from now on; command ids begin anew."""
        self.epoch, self._last_id = epoch_of(term, n), 0


def status_text(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name} {(error.details() or '')[:120]}".rstrip()
