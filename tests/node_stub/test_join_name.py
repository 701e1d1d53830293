"""A node that dials its head by name asks anew what the name stands for, each time it dials."""

from __future__ import annotations

import asyncio
import sys

from tests.node_stub.join_support import JoinHead
from tests.node_stub.link_support import PATIENCE_S
from tests.node_stub.name_server import NameServer
from tests.ports import quiet_port


async def test_a_head_that_moves_is_found_where_its_name_points_to_now() -> None:
    port = quiet_port()
    here, there = JoinHead(), JoinHead()
    here.address, there.address = f"127.0.0.1:{port}", f"127.0.0.2:{port}"
    await here.start()
    await there.start()
    async with NameServer("127.0.0.1") as names:
        node = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "node_stub", "--model", "stub", "--identity", "n1"),
            *("--join", names.target("head.example", port)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            link = await here.next_link()
            await link.bind()  # from now on it is dialed again within a second
            # The link that there is stays, until it ends.
            names.points_to = "127.0.0.2"
            await link.bind(session="another")
            assert there.dials == 0
            link.end()
            link = await there.next_link()
            await link.bind(session="third")
            # And back, to a head that has gone without a word.
            names.points_to = "127.0.0.1"
            await there.stop()
            link = await here.next_link()
            await link.bind(session="fourth")
        finally:
            node.kill()
            await asyncio.wait_for(node.wait(), PATIENCE_S)
    assert (here.dials, there.dials) == (2, 1)
    assert set(names.answers) == {"127.0.0.1", "127.0.0.2"}
    await here.stop()
    await there.maker.channel.close()
    await here.maker.channel.close()
