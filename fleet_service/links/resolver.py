"""Names by the system's resolver: what getaddrinfo knows, which is DNS, the hosts file and whatever else.

A look-up cannot be interrupted. Each has a thread that nobody waits for, so that a DNS server which does not
answer holds up neither the head's loop nor its end; a name that is being looked up gets no second one.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fleet_service.grpc_causes import NAME_NOT_FOUND
from fleet_service.runtime.protocols import ResolveError

_CAUSES = {
    socket.EAI_NONAME: NAME_NOT_FOUND,
    socket.EAI_NODATA: "the name has no addresses",
    socket.EAI_AGAIN: "the DNS server gives no answer",
    socket.EAI_FAIL: "the DNS server failed",
}


class SystemResolver:
    """A Resolver. `look_up` is called, in a thread, as socket.getaddrinfo is."""

    def __init__(self, look_up: Callable[..., Sequence[tuple[Any, ...]]] = socket.getaddrinfo) -> None:
        self._look_up = look_up
        self._under_way: dict[tuple[str, int], asyncio.Future[tuple[str, ...]]] = {}

    async def resolve(self, name: str, port: int) -> tuple[str, ...]:
        """The addresses, of the families that this machine has itself. Raises ResolveError."""
        answer = self._under_way.get((name, port))
        if answer is None:
            answer = self._start(name, port)
        return await asyncio.shield(answer)

    def _start(self, name: str, port: int) -> asyncio.Future[tuple[str, ...]]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[str, ...]] = loop.create_future()

        def settle(addresses: tuple[str, ...], error: ResolveError | None) -> None:
            self._under_way.pop((name, port), None)
            if error is None:
                answer.set_result(addresses)
            else:
                answer.set_exception(error)
                answer.exception()  # whoever asked may have given up

        def work() -> None:
            addresses: tuple[str, ...] = ()
            error: ResolveError | None = ResolveError("the look-up failed")
            try:
                addresses = self._addresses(name, port)
                error = None
            except (OSError, UnicodeError) as failed:
                error = ResolveError(_cause(failed))
            finally:
                with suppress(RuntimeError):  # the loop is closed: the head has ended meanwhile
                    loop.call_soon_threadsafe(settle, addresses, error)

        threading.Thread(target=work, name=f"look up {name}", daemon=True).start()
        self._under_way[name, port] = answer
        return answer

    def _addresses(self, name: str, port: int) -> tuple[str, ...]:
        found = self._look_up(name, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        hosts = dict.fromkeys(address[0] for *_, address in found)
        return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


def _cause(error: OSError | UnicodeError) -> str:
    if isinstance(error, socket.gaierror) and error.errno in _CAUSES:
        return _CAUSES[error.errno]
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "it is no host name"
