"""A name server for tests: one name, and the address that it has just now."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Self

_TYPE_A = 1
_ANSWER = 0x8580  # a response, authoritative, recursion desired and available


class NameServer(asyncio.DatagramProtocol):
    """Use as `async with NameServer("127.0.0.1") as names`; `points_to` may be changed at any time.

    Answers every question for an IPv4 address with that, not to be kept, and others with nothing.
    """

    def __init__(self, points_to: str) -> None:
        self.points_to = points_to
        self.answers: list[str] = []
        """Addresses given so far."""
        self._transport: asyncio.DatagramTransport | None = None

    def target(self, name: str, port: int) -> str:
        """What to dial, to have the name resolved here."""
        assert self._transport is not None
        host, own_port = self._transport.get_extra_info("sockname")
        return f"dns://{host}:{own_port}/{name}:{port}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, ("127.0.0.1", 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._transport is not None
        self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        """One question, answered."""
        assert self._transport is not None
        (query_id,) = struct.unpack_from("!H", data)
        end = data.index(0, 12) + 5
        question = data[12:end]
        (kind,) = struct.unpack_from("!H", data, end - 4)
        answer = b""
        if kind == _TYPE_A:
            self.answers.append(self.points_to)
            answer = struct.pack("!HHHIH", 0xC00C, _TYPE_A, 1, 0, 4) + socket.inet_aton(self.points_to)
        header = struct.pack("!HHHHHH", query_id, _ANSWER, 1, int(bool(answer)), 0, 0)
        self._transport.sendto(header + question + answer, addr)
