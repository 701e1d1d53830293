"""Runs a command's coroutine and turns what goes wrong into a text that says what to do, and an exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, NoReturn

import grpc
import typer

from fleet_service.cli.output import say
from fleet_service.client import CallError, UnreachableError

FAILED = 1
WRONG_USE = 2

# What to do about a refusal, by its reason, where the message alone does not say it.
_ADVICE = {
    "SESSION_NOT_FOUND": "see `fleet sessions`; a finished or expired session is gone, make a new one",
    "SESSION_PARKED": "resume the session first (FleetService.ResumeSession)",
    "GENERATION_IN_PROGRESS": "wait until the session's generation ends, or cancel it",
    "CONTEXT_TOO_LONG": "shorten the prompt, or add a node with a wider window (`fleet nodes` shows them)",
    "MODEL_NOT_FOUND": "see which models the nodes serve with `fleet nodes`",
    "MODEL_UNPLACEABLE": "ask for other labels, or see what the nodes carry with `fleet nodes --json`",
    "NO_ELIGIBLE_NODE": "see why with `fleet nodes` and `fleet explain`, then try again",
    "FLEET_SATURATED": "try again later, or add nodes with `fleet nodes add HOST:PORT`",
    "NODE_NOT_FOUND": "see the names and addresses with `fleet nodes`",
    "HEAD_DRAINING": "the head is shutting down; try again once it is back, or ask another head",
    "GENERATION_NOT_FOUND": "it is no longer kept, or the head was restarted; ask again",
}


def run(work: Coroutine[Any, Any, int | None], *, address: str, as_json: bool = False) -> None:
    """Run a command to its end. Raises typer.Exit with the code when that is not 0."""
    try:
        code = asyncio.run(work)
    except CallError as error:
        report(error, address=address, as_json=as_json)
        raise typer.Exit(FAILED) from None
    if code:
        raise typer.Exit(code)


def fail(text: str, code: int = FAILED) -> NoReturn:
    """End the command with a text on standard error."""
    say(f"fleet: {text}")
    raise typer.Exit(code)


def report(error: CallError, *, address: str, as_json: bool) -> None:
    """Print an error to standard error, for people or as one JSON object."""
    if as_json:
        say(json.dumps({"error": _as_object(error)}, ensure_ascii=False))
        return
    for line in _as_lines(error, address):
        say(line)


def _as_object(error: CallError) -> dict[str, Any]:
    return {
        "code": error.code.name,
        "reason": "UNREACHABLE" if isinstance(error, UnreachableError) else error.reason,
        "message": error.message,
        "metadata": dict(error.metadata),
        "violations": [{"field": name, "description": text} for name, text in error.violations],
        "resource": list(error.resource) if error.resource else None,
        "retry_after_s": error.retry_after_s,
        "fault_id": error.fault_id,
    }


def _as_lines(error: CallError, address: str) -> list[str]:
    if isinstance(error, UnreachableError):
        return [
            f"fleet: no head answers at {address} ({_short(error.message)})",
            "  start one:    fleet serve --node HOST:PORT",
            "  or say where: --address and --admin-address, or FLEET_ADDRESS and FLEET_ADMIN_ADDRESS",
        ]
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.reason:
        return [
            f"fleet: the head at {address} did not answer in time",
            "  it may be overloaded or frozen: try again, with --timeout SECONDS for longer",
        ]
    if error.code is grpc.StatusCode.UNIMPLEMENTED and not error.reason:
        return [
            f"fleet: what listens at {address} is not this service of a head",
            "  callers' and operators' services have an address each: --address, --admin-address",
        ]
    lines = [f"fleet: {error.message} [{error.reason or error.code.name}]"]
    violations = [f"{name}: {text}" for name, text in error.violations]
    lines += [f"  {violation}" for violation in violations if violation not in error.message]
    lines += [
        f"  {key}: {value}" for key, value in sorted(error.metadata.items()) if value not in error.message
    ]
    if error.fault_id:
        lines.append(f"  the head's log has more under {error.fault_id}")
    if error.retry_after_s is not None:
        lines.append(f"  try again in {error.retry_after_s:.3g} s")
    if advice := _ADVICE.get(error.reason):
        lines.append(f"  what to do: {advice}")
    return lines


def _short(message: str) -> str:
    """The last and plainest part of what grpc says about a connection."""
    return message.rsplit(": ", 1)[-1].strip().lower() or "no answer"
