"""`fleet sessions`."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from fleet.v1.fleet_service_pb2 import ListSessionsRequest, Session, SessionState
from fleet_service.cli.options import CALLERS, TIMEOUT_S, Address, AsJson, Timeout, examples
from fleet_service.cli.output import Column, duration, enum_name, plain, print_json, print_table, say
from fleet_service.cli.running import Head, run
from fleet_service.client import FleetClient

_PAGE_SIZE = 1000
_COLUMNS = (
    Column("SESSION"),
    Column("MODEL", shorten=True, drop=2),
    Column("STATE"),
    Column("CONTEXT", right=True, drop=1),
    Column("NODE", drop=3),
    Column("GENERATION", drop=5),
    Column("IDLE", right=True, drop=4),
)


class State(StrEnum):
    """States to filter by."""

    UNBOUND = "unbound"
    BOUND = "bound"
    GENERATING = "generating"
    PARKED = "parked"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog=examples("fleet sessions", "fleet sessions --state generating --node node-a --json"),
    )(sessions)


def sessions(
    *,
    state: Annotated[State | None, typer.Option("--state", help="Only those in this state.")] = None,
    node: Annotated[str, typer.Option("--node", help="Only those bound to this node.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most to show.")] = 1000,
    address: Address = CALLERS,
    as_json: AsJson = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Show the sessions, oldest first."""
    head = Head.for_callers(address, timeout)

    async def work() -> None:
        async with head.client() as client:
            found, more = await _pages(client, state, node, limit, timeout)
        if as_json:
            print_json({"sessions": [plain(session) for session in found], "more": more})
            return
        if not found:
            say("no sessions")
            return
        now_s = datetime.now(UTC).timestamp()
        print_table(_COLUMNS, [_row(session, now_s) for session in found])
        if more:
            say(f"there are more than {limit}; --limit shows more of them")

    run(work(), head=head, as_json=as_json)


async def _pages(
    client: FleetClient, state: State | None, node: str, limit: int, timeout_s: float
) -> tuple[list[Session], bool]:
    found: list[Session] = []
    wanted = None if state is None else f"SESSION_STATE_{state.name}"
    request = ListSessionsRequest(node=node, state=wanted)
    while True:
        request.page_size = min(_PAGE_SIZE, limit - len(found))
        reply = await client.ask(client.fleet.ListSessions(request, timeout=timeout_s))
        found += reply.sessions
        request.page_token = reply.next_page_token
        if not request.page_token or len(found) >= limit:
            return found, bool(request.page_token)


def _row(session: Session, now_s: float) -> tuple[str, ...]:
    return (
        session.session_id,
        session.spec.model,
        enum_name(SessionState.DESCRIPTOR, session.state).lower(),
        str(session.context_length),
        session.node or "-",
        session.generation_id or "-",
        duration(max(0.0, now_s - session.last_use_time.ToMilliseconds() / 1000) * 1000),
    )
