"""Whether a node lives: asked before it is given what runs, or has failed, elsewhere."""

from __future__ import annotations

import asyncio

from fleet_service.runtime.protocols import LinkError, NodeLink

PING_S = 1.0
"""How long a node gets to show that it lives."""


async def answers(link: NodeLink) -> bool:
    """Whether the node at the other end shows that it lives.

    In an outage of many the next node may be gone too, and nobody knows yet. Unasked, it would be lost as
    well, and the second loss be held against the request.
    """
    try:
        async with asyncio.timeout(PING_S):
            await link.ping()
    except (LinkError, TimeoutError):
        return False
    return True
