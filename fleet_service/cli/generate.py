"""`fleet generate`: asks for tokens and prints them as they come."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fleet.v1.fleet_service_pb2 import (
    AppendTokensRequest,
    CancelGenerationRequest,
    CompleteRequest,
    CreateSessionRequest,
    GenerateRequest,
    GenerationEvent,
    GenerationSpec,
    GetSessionRequest,
    ListModelsRequest,
    Session,
    SessionSpec,
)
from fleet.v1.types_pb2 import SamplingParams, TokenSequence
from fleet_service.cli.answers import Printer, given_address
from fleet_service.cli.kinds import HeadCommand
from fleet_service.cli.options import (
    CALLERS,
    TIMEOUT_S,
    Address,
    examples,
    parse_labels,
    parse_tokens,
)
from fleet_service.cli.output import count
from fleet_service.cli.running import FAILED, UNKNOWN_MODEL, WRONG_USE, Head, closest, fail, run
from fleet_service.client import REATTACH_GRACE_MS, CallError, FleetClient

_CANCEL_TIMEOUT_S = 3.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        cls=HeadCommand,
        epilog=examples(
            "fleet generate --model demo --tokens 1,2,3",
            "fleet generate --model demo --tokens 1,2,3 --session chat-7 --extend",
            "fleet generate --session chat-7 --tokens 4,5 --max-new 64 --json",
            "seq 1 500 | fleet generate --model demo --tokens -",
        ),
    )(generate)


@dataclass(frozen=True, slots=True)
class _Order:
    """What was asked for on the command line."""

    session_id: str
    spec: SessionSpec
    token_ids: list[int]
    generation: GenerationSpec
    generation_id: str


def generate(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    *,
    tokens: Annotated[
        str,
        typer.Option(
            "--tokens", metavar="IDS", help="The prompt as token ids: 1,2,3 or - for standard input."
        ),
    ] = "",
    model: Annotated[str, typer.Option("--model", help="Model to ask.")] = "",
    session: Annotated[
        str,
        typer.Option(
            "--session",
            metavar="ID",
            help="Session to go on with, after appending the tokens; with --model it is made when missing.",
        ),
    ] = "",
    max_new: Annotated[
        int | None, typer.Option("--max-new", min=0, help="Most tokens to generate.", show_default="2048")
    ] = None,
    max_wall: Annotated[
        float | None,
        typer.Option("--max-wall", min=0.001, metavar="SECONDS", help="Most time.", show_default="600"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="0 = greedy.", show_default="0")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", min=0, max=1, help="0 or 1 = off.")] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", min=0, max=1, help="0 = off.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, help="0 = off.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the draws.")] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="IDS", help="Token sequence that ends it; repeatable."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label the node must carry.")
    ] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add the answer to the session's context.")
    ] = False,
    address: Address = CALLERS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON event per line.")] = False,
) -> None:
    """Generate tokens and print their ids as they come; Ctrl-C cancels.

    Moves between nodes and the summary go to standard error. A head that is away is waited for, 10 s; an
    answer that was broken off there is taken up with `fleet attach`.

    Exits with 0 when the answer is whole (EOS, STOP, LENGTH), with 1 when it ended otherwise.
    """
    if not model and not session:
        raise typer.BadParameter("say --model NAME, or --session ID of a session that is there")
    if not tokens and not session:
        raise typer.BadParameter("say --tokens IDS, for example --tokens 1,2,3")
    if label and not model:
        raise typer.BadParameter("--label is for a new session: say --model NAME as well")
    sampling = _sampling(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=seed)
    spec = GenerationSpec(
        max_new_tokens=max_new,
        max_wall_ms=None if max_wall is None else max(1, round(max_wall * 1000)),
        stop=[TokenSequence(token_ids=parse_tokens(sequence)) for sequence in stop or []],
        extend_context=extend,
        disconnect_grace_ms=REATTACH_GRACE_MS,
        sampling=sampling if session else None,
    )
    token_ids = parse_tokens(sys.stdin.read() if tokens == "-" else tokens)
    if tokens and not token_ids:
        where = "standard input has none" if tokens == "-" else "here are none"
        raise typer.BadParameter(f"wants token ids, for example 1,2,3; {where}", param_hint="--tokens")
    order = _Order(
        session_id=session,
        spec=SessionSpec(model=model, sampling=sampling, node_selector=parse_labels(label or [])),
        token_ids=token_ids,
        generation=spec,
        generation_id=f"cli-{uuid.uuid4().hex}",
    )
    head = Head.for_callers(address)
    printer = Printer(as_json=as_json, where=given_address(context, address), asked=spec)
    run(_generate(order, head, printer), head=head, as_json=as_json)


def _sampling(**given: float | None) -> SamplingParams | None:
    said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**said) if said else None


async def _generate(order: _Order, head: Head, printer: Printer) -> int:
    async with head.client() as client:
        try:
            if order.session_id:
                await _prepare_session(client, order)
            await printer.take_all(_events(client, order, printer))
        except CallError as error:
            printer.failed(error, head=head, advice=await _advice(client, error, order.spec.model))
            return FAILED
        except asyncio.CancelledError:
            await _cancel(client, order.generation_id, printer)
            raise
        return printer.exit_code


async def _advice(client: FleetClient, error: CallError, model: str) -> str:
    """What helps where the model asked for may not be there at all; "" for any other error."""
    if not model or error.reason not in UNKNOWN_MODEL:
        return ""
    try:
        listed = await client.ask(client.fleet.ListModels(ListModelsRequest(), timeout=TIMEOUT_S))
    except CallError:
        return ""  # the first error is the one to tell of
    return closest(model, [each.model.name for each in listed.models])


async def _prepare_session(client: FleetClient, order: _Order) -> None:
    """Append the prompt to the session; where a model is named, make the session when it is missing."""
    refusal = None
    if order.spec.model:
        refusal = await _make_session(client, order)
        if refusal is None:
            return
    get = GetSessionRequest(session_id=order.session_id)
    try:
        found = await client.ask(client.fleet.GetSession(get, timeout=TIMEOUT_S))
    except CallError as error:
        if refusal is not None and error.reason == "SESSION_NOT_FOUND":
            raise refusal from None  # it is somebody else's
        raise
    _check_same(order, found.session)
    if order.token_ids:
        append = AppendTokensRequest(session_id=order.session_id, token_ids=order.token_ids)
        await client.ask(client.fleet.AppendTokens(append, timeout=TIMEOUT_S))


async def _make_session(client: FleetClient, order: _Order) -> CallError | None:
    """With the prompt in it. Where it is there already, what the head said to that."""
    create = CreateSessionRequest(session_id=order.session_id, spec=order.spec, token_ids=order.token_ids)
    try:
        await client.ask(client.fleet.CreateSession(create, timeout=TIMEOUT_S))
    except CallError as error:
        if error.reason != "SESSION_ALREADY_EXISTS":
            raise
        return error
    return None


def _check_same(order: _Order, session: Session) -> None:
    """End the command where it asks for another model or other labels than the session was made with."""
    there, asked = session.spec, order.spec
    if asked.model and asked.model != there.model:
        fail(
            f"session {session.session_id} is there, of model {there.model}, and stays so; "
            "leave --model out, or name another session",
            WRONG_USE,
        )
    if asked.node_selector and dict(asked.node_selector) != dict(there.node_selector):
        labels = ", ".join(f"{key}={value}" for key, value in sorted(there.node_selector.items()))
        fail(
            f"session {session.session_id} is there, with {labels or 'no labels'}, and stays so; "
            "leave --label out, or name another session",
            WRONG_USE,
        )


def _events(client: FleetClient, order: _Order, printer: Printer) -> AsyncGenerator[GenerationEvent]:
    if order.session_id:
        generate_request = GenerateRequest(
            session_id=order.session_id, generation_id=order.generation_id, spec=order.generation
        )
        return client.generate(generate_request, printer.reattached)
    complete_request = CompleteRequest(
        session=order.spec,
        token_ids=order.token_ids,
        spec=order.generation,
        generation_id=order.generation_id,
    )
    return client.complete(complete_request, printer.reattached)


async def _cancel(client: FleetClient, generation_id: str, printer: Printer) -> None:
    request = CancelGenerationRequest(generation_id=generation_id)
    try:
        await client.ask(client.fleet.CancelGeneration(request, timeout=_CANCEL_TIMEOUT_S))
    except CallError as error:
        printer.note(f"could not cancel ({error}); the head ends it in {REATTACH_GRACE_MS / 1000:.0f} s")
    else:
        printer.note(f"cancelled after {count(printer.tokens, 'token')}")
