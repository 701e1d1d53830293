"""What the head holds at one moment, as numbers for whoever watches it; read in O(nodes).

Sessions are never gone through: nodes count those bound to them, and of these those that generate, so that a
node's fall moves all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet_service.domain.session_table import SessionState
from fleet_service.runtime.fleet import Fleet
from fleet_service.runtime.generations import Generations
from fleet_service.runtime.journal import Journal
from fleet_service.runtime.sessions import Sessions
from fleet_service.runtime.views import FleetSummary, NodeInfo


@dataclass(frozen=True, slots=True)
class HeadGauges:
    """The head at one moment. `ready`: at least one node can be used."""

    nodes: Sequence[NodeInfo]
    sessions: Mapping[SessionState, int]
    context_tokens: int
    generations_running: int
    generations_kept: int
    books_balance: bool
    ready: bool
    draining: bool
    store_failing: bool = False


def read_gauges(
    fleet: Fleet,
    sessions: Sessions,
    generations: Generations,
    nodes: Sequence[NodeInfo],
    *,
    draining: bool,
    store_failing: bool,
) -> HeadGauges:
    """`nodes` is the picture of the nodes, taken just before."""
    usable = [node for node in fleet.nodes if node.usable]
    return HeadGauges(
        nodes=nodes,
        sessions=_by_state(
            total=len(sessions),
            parked=sessions.parked,
            generating=generations.running_count,
            bound=sum(node.sessions - node.generating_sessions for node in usable),
        ),
        context_tokens=sessions.context_tokens,
        generations_running=generations.running_count,
        generations_kept=generations.kept_count,
        books_balance=all(node.reservations == node.running + node.queued for node in nodes),
        ready=bool(usable),
        draining=draining,
        store_failing=store_failing,
    )


def read_summary(
    fleet: Fleet, sessions: Sessions, generations: Generations, journal: Journal, *, stopping: bool
) -> FleetSummary:
    """What those who watch the fleet are shown of it as a whole."""
    nodes = fleet.nodes
    return FleetSummary(
        sessions=_by_state(
            total=len(sessions),
            parked=sessions.parked,
            generating=generations.running_count,
            bound=sum(node.sessions - node.generating_sessions for node in nodes if node.usable),
        ),
        generations=generations.running_count,
        queued=sum(len(node.queue) for node in nodes),
        context_tokens=sessions.context_tokens,
        books_balance=all(node.books_balance for node in nodes),
        stopping=stopping,
        durability=journal.durability,
        store_trouble="" if journal.trouble is None else str(journal.trouble),
    )


def _by_state(*, total: int, parked: int, generating: int, bound: int) -> dict[SessionState, int]:
    return {
        # A session that has just ended its generation may be bound here and in doubt there, for one step.
        SessionState.UNBOUND: max(0, total - parked - generating - bound),
        SessionState.BOUND: bound,
        SessionState.GENERATING: generating,
        SessionState.PARKED: parked,
    }
