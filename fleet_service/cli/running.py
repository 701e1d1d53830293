"""Runs a command's coroutine and turns what goes wrong into a text that says what to do, and an exit code."""

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import grpc
import typer

from fleet_service.cli.kinds import credentials
from fleet_service.cli.options import TIMEOUT_S
from fleet_service.cli.output import say
from fleet_service.cli.unreachable import other_service, what_and_do
from fleet_service.client import CallError, FleetClient, NoAnswerError, UnreachableError
from fleet_service.credentials import CredentialsError

FAILED = 1
WRONG_USE = 2
# Refusals behind which a model may be that no node serves: as long as one node has never been up, the head
# cannot be sure of it.
UNKNOWN_MODEL = ("MODEL_NOT_FOUND", "NO_ELIGIBLE_NODE")
_NAMES_TOLD = 5

# What to do about a refusal, by its reason, at a command line; it stands for what the message says of that
# to callers, after its last "; ".
_ADVICE = {
    "SESSION_NOT_FOUND": "see `fleet sessions`; a finished or expired session is gone, make a new one",
    "SESSION_PARKED": "resume the session first (FleetService.ResumeSession)",
    "GENERATION_IN_PROGRESS": "wait until the session's generation ends, or cancel it",
    "CONTEXT_TOO_LONG": "shorten the prompt, or add a node with a wider window (`fleet explain` shows them)",
    "MODEL_NOT_FOUND": "see which models the nodes serve with `fleet nodes`",
    "MODEL_UNPLACEABLE": "ask for other labels, or see what the nodes carry with `fleet nodes --json`",
    "NO_ELIGIBLE_NODE": "see why with `fleet nodes` and `fleet explain`",
    "FLEET_SATURATED": "try again later, or add nodes with `fleet nodes add HOST:PORT`",
    "NODE_NOT_FOUND": "see the names and addresses with `fleet nodes`",
    "HEAD_DRAINING": "try again once the head is back, or ask another",
    "CREDENTIALS_REFUSED": "give your token with --access-token-file FILE, or a certificate with --tls-cert",
    "PERMISSION_DENIED": "use a token with the permission; `fleet access list --file FILE` shows who has it",
    "GENERATION_NOT_FOUND": "it is no longer kept; ask again",
}


@dataclass(frozen=True, slots=True)
class Head:
    """The listener of a head that a command talks to, and how its user says which and how long to wait."""

    address: str
    flag: str
    timeout_s: float = TIMEOUT_S
    timeout_flag: bool = True

    @classmethod
    def for_callers(cls, address: str, timeout_s: float | None = None) -> Self:
        """`timeout_s` None: the command has no --timeout."""
        given = timeout_s is not None
        return cls(address, "--address", TIMEOUT_S if timeout_s is None else timeout_s, timeout_flag=given)

    @classmethod
    def for_operators(cls, address: str, timeout_s: float) -> Self:
        return cls(address, "--admin-address", timeout_s)

    def client(self) -> FleetClient:
        """A client that goes on connecting for as long as its user wants to wait."""
        return FleetClient(
            self.address, self.address, connect_timeout_s=self.timeout_s, credentials=credentials()
        )


def run(work: Coroutine[Any, Any, int | None], *, head: Head, as_json: bool = False) -> None:
    """Run a command to its end. Raises typer.Exit with the code when that is not 0."""
    try:
        code = asyncio.run(work)
    except CredentialsError as error:
        fail(str(error), WRONG_USE)
    except CallError as error:
        report(error, head=head, as_json=as_json)
        raise typer.Exit(FAILED) from None
    if code:
        raise typer.Exit(code)


def fail(text: str, code: int = FAILED) -> NoReturn:
    """End the command with a text on standard error."""
    say(f"fleet: {text}")
    raise typer.Exit(code)


def report(error: CallError, *, head: Head, as_json: bool, advice: str = "") -> None:
    """Print an error to standard error, for people or as one JSON object. `advice` knows better than ours."""
    if as_json:
        say(json.dumps({"error": _as_object(error)}, ensure_ascii=False), wrap=False)
        return
    for line in _as_lines(error, head, advice):
        say(line)


def advice_on(reason: str) -> str:
    """What to do about a refusal; "" where its message says all."""
    return _ADVICE.get(reason, "")


def facts_of(reason: str, message: str) -> str:
    """A refusal's message; where the command line has advice of its own, without that to callers."""
    facts, _, _ = message.rpartition("; ")
    return facts if facts and reason in _ADVICE else message


def closest(name: str, served: Iterable[str]) -> str:
    """Advice on a model that no node serves: the one meant, or all there are; "" when it is served."""
    names = sorted(set(served))
    if name in names:
        return ""
    if close := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {close[0]}?"
    if not names:
        return "no node has been up yet: see `fleet nodes`"
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    return f"ask for one that is served: {', '.join(names[:_NAMES_TOLD])}{more}"


def _as_object(error: CallError) -> dict[str, Any]:
    return {
        "code": error.code.name,
        "reason": _own_reason(error) or error.reason,
        "message": error.message,
        "metadata": dict(error.metadata),
        "violations": [{"field": name, "description": text} for name, text in error.violations],
        "resource": list(error.resource) if error.resource else None,
        "retry_after_s": error.retry_after_s,
        "fault_id": error.fault_id,
    }


def _own_reason(error: CallError) -> str:
    if isinstance(error, UnreachableError):
        return "UNREACHABLE"
    return "NO_ANSWER" if isinstance(error, NoAnswerError) else ""


def _as_lines(error: CallError, head: Head, advice: str) -> list[str]:
    if isinstance(error, NoAnswerError):
        longer = ", or wait longer with --timeout SECONDS" if head.timeout_flag else ""
        waited = f"did not answer in {head.timeout_s:g} s"
        return [
            f"fleet: the head at {head.address} {waited}; it may be busy or far away",
            f"  try again{longer}",
        ]
    if isinstance(error, UnreachableError):
        what, do = what_and_do(error, head.address, head.flag, credentials())
        return [f"fleet: {what}", *(f"  {line}" for line in do)]
    if error.code is grpc.StatusCode.UNIMPLEMENTED and not error.reason:
        what, do = other_service(head.address, head.flag)
        return [f"fleet: {what}", *(f"  {line}" for line in do)]
    return _refusal_lines(error, advice or _advice_on_access(error) or advice_on(error.reason))


def _advice_on_access(error: CallError) -> str:
    """By what was given, and what the command needs."""
    if error.reason == "CREDENTIALS_REFUSED" and (file := credentials().token_file):
        return f"ask who keeps the head's access file for a new token: it does not take the one in {file}"
    if error.reason == "PERMISSION_DENIED" and error.metadata.get("permission") == "call":
        return (
            "use a token with the permission call; the operators' page (listen.page) shows the sessions of "
            "all callers to those who may read"
        )
    return ""


def _refusal_lines(error: CallError, advice: str) -> list[str]:
    lines = [f"fleet: {facts_of(error.reason, error.message)} [{error.reason or error.code.name}]"]
    # What the message says already is not said again.
    lines += [f"  {name}: {text}" for name, text in error.violations if text not in error.message]
    lines += [
        f"  {key}: {value}" for key, value in sorted(error.metadata.items()) if value not in error.message
    ]
    if error.fault_id:
        lines.append(f"  the head's log has more under {error.fault_id}")
    if error.retry_after_s is not None:
        lines.append(f"  try again in {error.retry_after_s:.3g} s")
    if advice:
        lines.append(f"  what to do: {advice}")
    return lines
