"""Who may call a node's server: heads that know the fleet token, and for the stub's control this machine."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from node_stub.token import PROOF_KEY, FleetToken

log = logging.getLogger(__name__)

_NAME_CHARS = 128

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Refuse: TypeAlias = "Callable[[grpc.aio.ServicerContext[Any, Any]], Awaitable[None]]"

_LOCAL_PEERS = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")


def is_local(peer: str) -> bool:
    """Whether a gRPC peer (`ipv4:127.0.0.1:5`) is on this machine."""
    return peer.startswith(_LOCAL_PEERS)


class RefusalLog:
    """Logs heads that were refused, one a period: a head dials again and again. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float], period_s: float = 30.0) -> None:
        self._clock = clock
        self._period_s = period_s
        self._next_s = clock()

    def tell(self, head: str, peer: str, why: str) -> None:
        """A head was refused. What it calls itself is cut: anybody can say it."""
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + self._period_s
        log.warning("refused head %s at %s: %s", head[:_NAME_CHARS] or "(unnamed)", peer, why)


class TokenGate(grpc.aio.ServerInterceptor):
    """Lets calls of one service pass only with a head's proof. `open_methods` need none."""

    def __init__(self, token: FleetToken, service: str, open_methods: frozenset[str], refuse: Refuse) -> None:
        self._token = token
        self._prefix = f"/{service}/"
        self._open = frozenset(f"{self._prefix}{method}" for method in open_methods)
        self._refuse = refuse

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix) or details.method in self._open:
            return handler
        proofs = [value for key, value in details.invocation_metadata or () if key == PROOF_KEY]
        if len(proofs) == 1 and isinstance(proofs[0], bytes) and self._token.accepts_metadata(proofs[0]):
            return handler
        return self._refusing(handler)

    def _refusing(self, handler: Any) -> Handler:
        """The same kind of call, which ends with the refusal."""

        async def refuse(_: object, context: Any) -> None:
            await self._refuse(context)

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse, request_deserializer=bytes)
        return grpc.unary_unary_rpc_method_handler(refuse, request_deserializer=bytes)
