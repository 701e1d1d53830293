"""What the silence of nodes means (design: Failures; rule 13: the head doubts itself first).

One silent node is suspect, and what runs there goes on elsewhere. When more than a third of the nodes fall
silent at about the same time, the fault is as likely here: nothing is failed over until fewer are silent, a
link breaks (a dead machine refuses or resets), or it has lasted too long.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import structlog

from fleet_service.domain.failures import FailureClass
from fleet_service.domain.node_types import NodeState
from fleet_service.runtime.fairness import in_turns
from fleet_service.runtime.node import Node

log = structlog.get_logger(__name__)

TOGETHER_S = 2.0
"""Nodes that fell silent within this time of each other fell silent together."""

NEARLY = 2 / 3
"""Of the silence limit: a node that was quiet so long counts as silent where it is asked who else is. Else
the first of many that fall silent together would be judged alone, a moment before the others."""

SILENT_AT_ONCE = 8
"""Nodes judged before others have their turn."""

DOUBT_FACTOR = 3.0
"""After so many times the silence limit, even silence of many is taken for what it looks like."""


async def judge_silence(nodes: Sequence[Node], silence_s: float, now_s: float) -> None:
    """Suspect the silent nodes, and fail what runs on those whose silence is beyond doubt."""
    linked = [node for node in nodes if node.link is not None]
    quiet = [node for node in linked if now_s - node.last_sign_s > NEARLY * silence_s]
    signs_s = sorted(node.last_sign_s for node in quiet)
    silent = [node for node in quiet if now_s - node.last_sign_s > silence_s]
    async for node in in_turns(silent, SILENT_AT_ONCE):
        quiet_s = now_s - node.last_sign_s
        if quiet_s <= silence_s or node.link is None:
            continue  # it was heard, or lost, while others had their turn
        doubted = in_doubt(node.last_sign_s, signs_s, len(linked)) and quiet_s < DOUBT_FACTOR * silence_s
        detail = f"nothing heard for {quiet_s:.1f} s"
        if node.state is NodeState.UP:
            log.warning("node_silent", node=node.name, quiet_s=round(quiet_s, 3), in_doubt=doubted)
            node.set_state(NodeState.SUSPECT, detail)
        if not doubted:
            node.fail_running(FailureClass.NODE_SILENT, detail)


def in_doubt(last_sign_s: float, signs_s: Sequence[float], linked: int) -> bool:
    """More than a third of the nodes, and not one alone, fell silent together with the one of that last sign.

    `signs_s`: the last signs of all that are silent, in order.
    """
    since, until = last_sign_s - TOGETHER_S, last_sign_s + TOGETHER_S
    together = bisect_right(signs_s, until) - bisect_left(signs_s, since)
    return together >= 2 and together * 3 > linked
