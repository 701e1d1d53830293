"""The least a relay can cost: one stream in, one stream out, with no head between.

`python -m benchmarks.bare source` emits tokens at a pace; `python -m benchmarks.bare relay ADDRESS` passes on
to callers what the source at ADDRESS says. Both serve FleetService.Complete, so that `benchmarks.relay` can
put the same load on a bare relay and on a head. Nothing is checked, placed or remembered here.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1.fleet_service_pb2_grpc import FleetServiceStub
from fleet_service.app import loop_factory

if TYPE_CHECKING:
    from fleet.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

Complete = Callable[[pb.CompleteRequest, Any], AsyncIterator[pb.CompleteResponse]]


def emitting(rate: float) -> Complete:
    """Emits as many tokens as are asked for, `rate` a second for each stream; 0 is as fast as it can."""

    async def complete(request: pb.CompleteRequest, _: Any) -> AsyncIterator[pb.CompleteResponse]:
        for index in range(request.spec.max_new_tokens):
            if rate:
                await asyncio.sleep(1 / rate)
            tokens = pb.Tokens(first_index=index, token_ids=[index])
            yield pb.CompleteResponse(event=pb.GenerationEvent(tokens=tokens))

    return complete


def relaying(source: FleetServiceAsyncStub) -> Complete:
    """Passes every message on as it comes."""

    async def complete(request: pb.CompleteRequest, _: Any) -> AsyncIterator[pb.CompleteResponse]:
        async for response in source.Complete(request):
            yield response

    return complete


async def _serve(complete: Complete) -> None:
    handler = grpc.unary_stream_rpc_method_handler(
        complete,
        request_deserializer=pb.CompleteRequest.FromString,
        response_serializer=pb.CompleteResponse.SerializeToString,
    )
    service = pb.DESCRIPTOR.services_by_name["FleetService"].full_name
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Complete": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"bare: serving on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def _relay(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        await _serve(relaying(FleetServiceStub(channel)))


def main() -> None:
    """Serve one of the two until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    roles = parser.add_subparsers(dest="role", required=True)
    source = roles.add_parser("source", help="emit tokens")
    source.add_argument("--rate", type=float, default=0.0, help="tokens a second for each stream")
    roles.add_parser("relay", help="pass tokens on").add_argument("address", help="where the source is")
    told = parser.parse_args()
    work = _serve(emitting(told.rate)) if told.role == "source" else _relay(told.address)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work)


if __name__ == "__main__":
    main()
