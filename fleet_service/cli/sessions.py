"""`fleet sessions`, with finish and cancel."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from fleet.v1.fleet_service_pb2 import (
    CancelGenerationRequest,
    FinishSessionRequest,
    GetSessionRequest,
    ListSessionsRequest,
    Session,
    SessionState,
)
from fleet_service.cli.kinds import HeadCommand, HeadGroup
from fleet_service.cli.options import CALLERS, TIMEOUT_S, Address, AsJson, Timeout, examples
from fleet_service.cli.output import Column, duration, enum_name, plain, print_json, print_table, say, tell
from fleet_service.cli.running import FAILED, Head, report, run
from fleet_service.client import CallError, FleetClient, NoAnswerError

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


SessionIds = Annotated[list[str], typer.Argument(metavar="ID", help="Sessions, as `fleet sessions` shows.")]


class State(StrEnum):
    """States to filter by."""

    UNBOUND = "unbound"
    BOUND = "bound"
    GENERATING = "generating"
    PARKED = "parked"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(cls=HeadGroup, invoke_without_command=True, rich_markup_mode="rich")
    group.callback(
        epilog=examples(
            "fleet sessions",
            "fleet sessions --state generating --node node-a --json",
            "fleet sessions finish chat-7",
        ),
    )(sessions)
    group.command(cls=HeadCommand, epilog=examples("fleet sessions finish chat-7 chat-8"))(finish)
    group.command(cls=HeadCommand, epilog=examples("fleet sessions cancel chat-7"))(cancel)
    app.add_typer(group, name="sessions")


def sessions(
    *,
    context: typer.Context,
    state: Annotated[State | None, typer.Option("--state", help="Only those in this state.")] = None,
    node: Annotated[str, typer.Option("--node", help="Only those bound to this node.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most to show.")] = 1000,
    address: Address = CALLERS,
    as_json: AsJson = False,
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Show the sessions that are yours, oldest first; finish some, or cancel what they generate."""
    if context.invoked_subcommand is not None:
        return
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


def finish(
    *, ids: SessionIds, address: Address = CALLERS, as_json: AsJson = False, timeout: Timeout = TIMEOUT_S
) -> None:
    """Finish sessions: what they generate is cancelled, and their contexts are gone."""

    async def one(client: FleetClient, session_id: str) -> str:
        request = FinishSessionRequest(session_id=session_id)
        await client.ask(client.fleet.FinishSession(request, timeout=timeout))
        return "finished"

    _each(ids, one, Head.for_callers(address, timeout), as_json=as_json)


def cancel(
    *, ids: SessionIds, address: Address = CALLERS, as_json: AsJson = False, timeout: Timeout = TIMEOUT_S
) -> None:
    """Cancel what sessions generate; they stay, and what was delivered stands."""

    async def one(client: FleetClient, session_id: str) -> str:
        asked = GetSessionRequest(session_id=session_id)
        found = await client.ask(client.fleet.GetSession(asked, timeout=timeout))
        if not found.session.generation_id:
            return "generates nothing"
        request = CancelGenerationRequest(generation_id=found.session.generation_id)
        await client.ask(client.fleet.CancelGeneration(request, timeout=timeout))
        return "cancelled"

    _each(ids, one, Head.for_callers(address, timeout), as_json=as_json)


def _each(
    ids: list[str], one: Callable[[FleetClient, str], Awaitable[str]], head: Head, *, as_json: bool
) -> None:
    """Do it to one session after the other, and go on where one is refused. Fails when any was."""

    async def work() -> int:
        code = 0
        async with head.client() as client:
            for session_id in ids:
                try:
                    done = await one(client, session_id)
                except CallError as error:
                    if error.connection_lost or isinstance(error, NoAnswerError):
                        raise
                    report(error, head=head, as_json=as_json)
                    code = FAILED
                    continue
                if as_json:
                    print_json({"session_id": session_id, "outcome": done})
                else:
                    tell(f"{session_id}: {done}")
        return code

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
    idle_ms = max(0.0, now_s * 1000 - session.last_use_time.ToMilliseconds())
    return (
        session.session_id,
        session.spec.model,
        enum_name(SessionState.DESCRIPTOR, session.state).lower(),
        str(session.context_length),
        session.node or "-",
        session.generation_id or "-",
        "-" if session.generation_id else duration(idle_ms),
    )
