"""What the silence of nodes means (design: Failures; rule 13: the head doubts itself first).

One silent node is suspect, and what runs there goes on elsewhere. When more than a third of the nodes fall
silent at about the same time, the fault is as likely here: nothing is failed over until fewer are silent, a
link breaks (a dead machine refuses or resets), or it has lasted too long.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from fleet_service.domain.failures import FailureClass
from fleet_service.domain.node_types import NodeState
from fleet_service.runtime.node import Node

log = structlog.get_logger(__name__)

TOGETHER_S = 2.0
"""Nodes that fell silent within this time of each other fell silent together."""

NEARLY = 2 / 3
"""Of the silence limit: a node that was quiet so long counts as silent where it is asked who else is. Else
the first of many that fall silent together would be judged alone, a moment before the others."""

DOUBT_FACTOR = 3.0
"""After so many times the silence limit, even silence of many is taken for what it looks like."""


def judge_silence(nodes: Sequence[Node], silence_s: float, now_s: float) -> None:
    """Suspect the silent nodes, and fail what runs on those whose silence is beyond doubt."""
    linked = [node for node in nodes if node.link is not None]
    quiet = [node for node in linked if now_s - node.last_sign_s > NEARLY * silence_s]
    for node in quiet:
        quiet_s = now_s - node.last_sign_s
        if quiet_s <= silence_s:
            continue
        doubted = in_doubt(node, quiet, len(linked)) and quiet_s < DOUBT_FACTOR * silence_s
        detail = f"nothing heard for {quiet_s:.1f} s"
        if node.state is NodeState.UP:
            log.warning("node_silent", node=node.name, quiet_s=round(quiet_s, 3), in_doubt=doubted)
            node.set_state(NodeState.SUSPECT, detail)
        if not doubted:
            node.fail_running(FailureClass.NODE_SILENT, detail)


def in_doubt(node: Node, silent: Sequence[Node], linked: int) -> bool:
    """More than a third of the nodes, and not one alone, fell silent together with `node`."""
    together = sum(abs(other.last_sign_s - node.last_sign_s) <= TOGETHER_S for other in silent)
    return together >= 2 and together * 3 > linked
