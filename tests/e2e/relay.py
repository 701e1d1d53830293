"""A relay between a node and what it dials, which can keep the other side from hearing of the node's end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self


class Relay:
    """Use as `async with Relay(port) as relay`, and let nodes dial `relay.address`.

    What a node sends reaches `port` of this machine; that it has gone does not, until `let_go`.
    """

    def __init__(self, port: int) -> None:
        self.address = ""
        self._port = port
        self._server: asyncio.Server | None = None
        self._held: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> int:
        """Connections of nodes that have gone, unknown to the other side."""
        return len(self._held)

    async def let_go(self) -> None:
        """Tell the other side now of what has gone."""
        while self._held:
            await _close(self._held.pop())

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        await self.let_go()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        there, to_there = await asyncio.open_connection("127.0.0.1", self._port)
        back = asyncio.create_task(_pump(there, writer), name="relay back")
        try:
            await _pump(reader, to_there)
            self._held.append(to_there)
        except asyncio.CancelledError:
            await _close(to_there)
        finally:
            back.cancel()
            await asyncio.wait({back})
            await _close(writer)
            self._pumps.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until `reader` ends, or the connection of either breaks."""
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
