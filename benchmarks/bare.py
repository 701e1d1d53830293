"""The least a middle process can cost in the head's language and with its gRPC library; and a sink of spans.

Relays that check, place and remember nothing, and a collector of spans that throws them away.
`python -m benchmarks.bare relay ADDRESS ...` passes streams of FleetService.Complete on as bytes, from the
sources at those addresses in turn. `python -m benchmarks.bare gather ADDRESS ...` serves
FleetService.Connect: one stream to each source and one to each caller, and of each message from a source
every caller gets its share in one message. `python -m benchmarks.bare sink` takes spans by OTLP.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import count, cycle
from typing import Any, TypeAlias

import grpc

from fleet.v1 import fleet_service_pb2 as pb
from fleet_service.app import loop_factory

_SERVICE = "fleet.v1.FleetService"
_SPANS = "opentelemetry.proto.collector.trace.v1.TraceService"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def relaying(addresses: Sequence[str]) -> Handler:
    """Passes every message on as it comes, without looking into it."""
    sources: Iterator[Any] = cycle(
        [grpc.aio.insecure_channel(address).unary_stream(f"/{_SERVICE}/Complete") for address in addresses]
    )

    async def complete(request: bytes, context: Any) -> None:
        async for response in next(sources)(request):
            await context.write(response)

    return grpc.unary_stream_rpc_method_handler(complete)


class _Outbox:
    """What is to be written to one stream: all that is there goes in one message."""

    def __init__(self, message: pb.ConnectRequest | pb.ConnectResponse) -> None:
        self._kind = type(message)
        self.message = message
        self.ready = asyncio.Event()

    async def run(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            await self.ready.wait()
            self.ready.clear()
            payload, self.message = self.message.SerializeToString(), self._kind()
            await write(payload)


class Gatherer:
    """Between callers' and sources' Connect streams."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._calls: dict[int, tuple[_Outbox, int]] = {}
        """By the number of a call at its source, its caller and the caller's number of it."""
        self._numbers = count(1)
        self._outboxes = [_Outbox(pb.ConnectRequest()) for _ in addresses]
        self._sources = cycle(self._outboxes)
        self._tasks = [
            asyncio.ensure_future(self._source(address, outbox))
            for address, outbox in zip(addresses, self._outboxes, strict=True)
        ]

    def handler(self) -> Handler:
        return grpc.stream_stream_rpc_method_handler(self._caller)

    async def _caller(self, requests: AsyncIterator[bytes], context: Any) -> None:
        outbox = _Outbox(pb.ConnectResponse())
        writing = asyncio.ensure_future(outbox.run(context.write))
        try:
            async for request in requests:
                self._ask(pb.ConnectRequest.FromString(request), outbox)
        finally:
            writing.cancel()

    def _ask(self, request: pb.ConnectRequest, caller: _Outbox) -> None:
        for call in request.calls:
            number, source = next(self._numbers), next(self._sources)
            self._calls[number] = caller, call.call_id
            source.message.calls.add(call_id=number, complete=call.complete)  # type: ignore[union-attr]
            source.ready.set()

    async def _source(self, address: str, outbox: _Outbox) -> None:
        stream: Any = grpc.aio.insecure_channel(address).stream_stream(f"/{_SERVICE}/Connect")()
        writing = asyncio.ensure_future(outbox.run(stream.write))
        async for payload in stream:
            self._share_out(pb.ConnectResponse.FromString(payload))
        writing.cancel()

    def _share_out(self, response: pb.ConnectResponse) -> None:
        columns, at = response.tokens, 0
        ids = columns.token_ids
        for number, many, first in zip(columns.call_ids, columns.counts, columns.first_indexes, strict=True):
            caller, call_id = self._calls[number]
            tokens = caller.message.tokens  # type: ignore[union-attr]
            tokens.call_ids.append(call_id)
            tokens.counts.append(many)
            tokens.first_indexes.append(first)
            tokens.token_ids.extend(ids[at : at + many])
            at += many
            caller.ready.set()
        for reply in response.replies:
            caller, call_id = self._calls.pop(reply.call_id)
            caller.message.replies.add(call_id=call_id, finished=reply.finished)  # type: ignore[union-attr]
            caller.ready.set()


def swallowing() -> Handler:
    async def export(_: bytes, __: Any) -> bytes:
        return b""

    return grpc.unary_unary_rpc_method_handler(export)


async def _serve(role: str, addresses: Sequence[str]) -> None:
    server = grpc.aio.server()
    service, methods = _SERVICE, {}
    if role == "relay":
        methods["Complete"] = relaying(addresses)
    elif role == "gather":
        methods["Connect"] = Gatherer(addresses).handler()
    else:
        service, methods["Export"] = _SPANS, swallowing()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"bare: serving on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """Serve one of them until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("relay", "gather", "sink"))
    parser.add_argument("address", nargs="*", help="where the sources are")
    told = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(told.role, told.address))


if __name__ == "__main__":
    main()
