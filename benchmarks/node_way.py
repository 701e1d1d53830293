"""Calls of nodes by themselves, over LinkService.Link, as a head makes them."""

from __future__ import annotations

import os
import time
from array import array

from benchmarks.calls import Call
from benchmarks.grpc_way import open_connection
from benchmarks.http2 import Connection, Messages, message, request_headers
from benchmarks.stamps import now_us
from fleet.v1 import link_pb2, link_service_pb2, types_pb2
from fleet.v1 import node_service_pb2 as pb
from fleet_service.domain.context import crc32_of

MODEL = "bench"
_LINK = request_headers("/fleet.v1.LinkService/Link")
_LEASE_MS = 60_000
_WALL_MS = 600_000
_GREEDY = types_pb2.SamplingParams(temperature=0, top_p=1, min_p=0, top_k=0, seed=0)


class _Link:
    """One connection to one node. What begins in one turn leaves in one frame."""

    def __init__(self, term: int) -> None:
        self.connection = Connection(self, client=True)
        self._term = term
        self._head_id = f"bench-{os.getpid()}"
        self._stream = 0
        self._messages = Messages()
        self._made = 0
        self._asked: dict[int, tuple[Call, pb.RevokeRequest]] = {}
        """By call id, until the node has given a handle."""
        self._runs: dict[int, tuple[Call, pb.RevokeRequest]] = {}
        self._frame = link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_COMMANDS)

    def begin(self) -> None:
        hello = pb.HandshakeRequest(
            min_version=1,
            max_version=1,
            fleet_id="default",
            head_id=self._head_id,
            term=self._term,
            report_period_ms=2_000,
        )
        self._stream = self.connection.open(_LINK, b"", end=False)
        self._send(link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_HELLO, must_understand=True, hello=hello))

    def start(self, call: Call, salt: int) -> None:
        self._made += 1
        name, epoch = f"{self._head_id}-{self._made}", self._term << 32 | self._made
        token_ids = [3 + salt, 5, 7, 11]
        command = self._frame.commands.add(call_id=2 * self._made)
        generate = command.generate
        generate.session_id, generate.epoch, generate.command_id = name, epoch, 3
        generate.generation_id, generate.max_new_tokens, generate.max_wall_ms = name, call.wanted, _WALL_MS
        generate.context_length, generate.context_crc32 = len(token_ids), crc32_of(array("I", token_ids))
        assign, append = generate.assign, generate.append
        assign.session_id = append.session_id = name
        assign.epoch = append.epoch = epoch
        assign.command_id, append.command_id = 1, 2
        assign.fleet_id, assign.head_id, assign.model, assign.lease_ms = (
            "default",
            self._head_id,
            MODEL,
            _LEASE_MS,
        )
        assign.sampling.CopyFrom(_GREEDY)
        generate.sampling.CopyFrom(_GREEDY)
        append.token_ids.extend(token_ids)
        self._asked[2 * self._made] = call, pb.RevokeRequest(session_id=name, epoch=epoch)

    def on_turn(self) -> None:
        if self._frame.commands and self._stream:
            self._send(self._frame)
            self._frame = link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_COMMANDS)

    def _send(self, frame: link_pb2.HeadFrame) -> None:
        self.connection.send(
            self._stream, message(link_service_pb2.LinkRequest(frame=frame).SerializeToString())
        )

    def on_headers(self, stream: int, *, end: bool) -> None:
        if end:
            self._lose("the link ended")

    def on_data(self, stream: int, data: bytes, *, end: bool) -> None:
        now = now_us()
        for payload in self._messages.feed(data):
            self._take(link_service_pb2.LinkResponse.FromString(payload).frame, now)
        if end:
            self._lose("the link ended")

    def _take(self, frame: link_pb2.NodeFrame, now: int) -> None:
        if frame.type == link_pb2.FRAME_TYPE_REFUSED:
            self._lose(frame.refused.message)
        for reply in frame.replies:
            if asked := self._asked.pop(reply.call_id, None):
                if reply.generate.HasField("refusal"):
                    asked[0].finish(reply.generate.refusal.detail or "refused", now)
                else:
                    self._runs[reply.generate.handle] = asked
        steps, at = frame.steps, 0
        ids = steps.token_ids
        for handle, count, first in zip(steps.handles, steps.counts, steps.first_indexes, strict=True):
            if run := self._runs.get(handle):
                run[0].take(first, ids[at : at + count], now)
            at += count
        for event in frame.events:
            if (event.finish or event.HasField("refusal")) and (run := self._runs.pop(event.handle, None)):
                call, revoke = run
                self._made += 1
                self._frame.commands.add(call_id=2 * self._made, revoke=revoke)
                call.finish("", now)

    def on_reset(self, stream: int) -> None:
        self._lose("the link ended")

    def on_lost(self) -> None:
        self._lose("the connection broke")

    def _lose(self, why: str) -> None:
        lost = [*self._asked.values(), *self._runs.values()]
        self._asked, self._runs = {}, {}
        for call, _ in lost:
            call.finish(why, now_us())


class NodeWay:
    """A link to each of several nodes (`addresses`, with commas between), which calls take in turn."""

    def __init__(self, addresses: str) -> None:
        term = int(time.time())
        self._links = [(address, _Link(term)) for address in addresses.split(",")]
        self._next = 0

    async def connect(self) -> None:
        for address, link in self._links:
            await open_connection(address, link.connection)
            link.begin()
            link.connection.flush()

    def start(self, call: Call, salt: int) -> None:
        self._links[self._next][1].start(call, salt)
        self._next = (self._next + 1) % len(self._links)

    def flush(self) -> None:
        for _, link in self._links:
            link.on_turn()
            link.connection.flush()

    def close(self) -> None:
        for _, link in self._links:
            link.connection.close()
