"""`fleet generate`: asks for tokens and prints them as they come."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fleet.v1.fleet_service_pb2 import (
    AppendTokensRequest,
    CancelGenerationRequest,
    CompleteRequest,
    CreateSessionRequest,
    Finished,
    GenerateRequest,
    GenerationEvent,
    GenerationSpec,
    GetSessionRequest,
    ListModelsRequest,
    Moved,
    Session,
    SessionSpec,
)
from fleet.v1.fleet_service_pb2 import MoveCause as MoveCauseEnum
from fleet.v1.types_pb2 import FinishReason, SamplingParams, TokenSequence
from fleet_service.cli.kinds import HeadCommand
from fleet_service.cli.options import (
    CALLERS,
    TIMEOUT_S,
    Address,
    examples,
    parse_labels,
    parse_tokens,
)
from fleet_service.cli.output import count, duration, enum_name, plain, print_json, say, terminal_width
from fleet_service.cli.running import (
    FAILED,
    UNKNOWN_MODEL,
    WRONG_USE,
    Head,
    closest,
    facts_of,
    fail,
    report,
    run,
)
from fleet_service.client import REATTACH_GRACE_MS, CallError, FleetClient, Reattached

_WHOLE_ANSWERS = (
    FinishReason.FINISH_REASON_EOS,
    FinishReason.FINISH_REASON_STOP,
    FinishReason.FINISH_REASON_LENGTH,
)
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

    Moves between nodes and the summary go to standard error.

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
    run(_generate(order, head, as_json=as_json), head=head, as_json=as_json)


def _sampling(**given: float | None) -> SamplingParams | None:
    said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**said) if said else None


async def _generate(order: _Order, head: Head, *, as_json: bool) -> int:
    async with head.client() as client:
        printer = _Printer(order.generation, as_json=as_json)
        try:
            if order.session_id:
                await _prepare_session(client, order)
            async with aclosing(_events(client, order, printer)) as events:
                async for event in events:
                    printer.take(event)
        except CallError as error:
            if error.reason == "DATA_LOSS" and not as_json:
                printer.note(_loss_text(error))
                return FAILED
            report(error, head=head, as_json=as_json, advice=await _advice(client, error, order.spec.model))
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
    """Append the prompt to the session; make the session when it is missing and a model is named."""
    try:
        found = await client.ask(
            client.fleet.GetSession(GetSessionRequest(session_id=order.session_id), timeout=TIMEOUT_S)
        )
    except CallError as error:
        if error.reason != "SESSION_NOT_FOUND" or not order.spec.model:
            raise
        create = CreateSessionRequest(session_id=order.session_id, spec=order.spec, token_ids=order.token_ids)
        await client.ask(client.fleet.CreateSession(create, timeout=TIMEOUT_S))
        return
    _check_same(order, found.session)
    if order.token_ids:
        append = AppendTokensRequest(session_id=order.session_id, token_ids=order.token_ids)
        await client.ask(client.fleet.AppendTokens(append, timeout=TIMEOUT_S))


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


def _events(client: FleetClient, order: _Order, printer: _Printer) -> AsyncGenerator[GenerationEvent]:
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


async def _cancel(client: FleetClient, generation_id: str, printer: _Printer) -> None:
    request = CancelGenerationRequest(generation_id=generation_id)
    try:
        await client.ask(client.fleet.CancelGeneration(request, timeout=_CANCEL_TIMEOUT_S))
    except CallError as error:
        printer.note(f"could not cancel ({error}); the head ends it in {REATTACH_GRACE_MS / 1000:.0f} s")
    else:
        printer.note(f"cancelled after {count(printer.tokens, 'token')}")


class _Printer:
    """Prints a stream's events, and keeps what the exit code and the summary need."""

    def __init__(self, asked: GenerationSpec, *, as_json: bool) -> None:
        self._asked = asked
        self._as_json = as_json
        self._column = 0
        self.tokens = 0
        self.exit_code = FAILED

    def take(self, event: GenerationEvent) -> None:
        """Print one event."""
        kind = event.WhichOneof("event")
        if kind == "finished" and event.finished.reason in _WHOLE_ANSWERS:
            self.exit_code = 0
        if kind == "tokens":
            self.tokens += len(event.tokens.token_ids)
        if self._as_json:
            if kind is not None:
                branch = {"branch": event.branch} if event.branch else {}
                print_json({"event": kind, **branch, **plain(getattr(event, kind))})
        elif kind == "tokens":
            self._print_ids(event.tokens.token_ids)
        elif kind == "moved":
            self.note(_moved_text(event.moved))
        elif kind == "finished":
            self.note(_finished_text(event.finished, self._asked))

    def _print_ids(self, token_ids: Iterable[int]) -> None:
        """One line; in a terminal as many as it takes, so that no id is broken in two."""
        width = terminal_width(sys.stdout)
        pieces = []
        for each in map(str, token_ids):
            if self._column:
                fits = width is None or self._column + 1 + len(each) < width
                pieces.append(" " if fits else "\n")
                self._column = self._column + 1 if fits else 0
            pieces.append(each)
            self._column += len(each)
        sys.stdout.write("".join(pieces))
        sys.stdout.flush()

    def reattached(self, what: Reattached) -> None:
        """Say that the connection was lost."""
        cause = facts_of(what.error.reason, what.error.message)
        self.note(f"connection lost ({cause}); going on at index {what.next_index}")

    def note(self, text: str) -> None:
        """A line on standard error, below the tokens printed so far."""
        if self._column:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._column = 0
        say(text)


def _loss_text(error: CallError) -> str:
    index = error.metadata.get("nextIndex", "0")
    return (
        f"fleet: the head lost tokens that it gave: the first {index} above are right, "
        f"those from index {index} on may not be [{error.reason}]"
    )


def _moved_text(moved: Moved) -> str:
    cause = enum_name(MoveCauseEnum.DESCRIPTOR, moved.cause)
    return (
        f"moved: {moved.from_node} -> {moved.to_node} at index {moved.next_index}"
        f" ({cause}), gap {duration(moved.gap_ms)}"
    )


def _finished_text(finished: Finished, asked: GenerationSpec) -> str:
    timings = finished.timings
    parts = [f"finished: {enum_name(FinishReason.DESCRIPTOR, finished.reason)}"]
    if finished.HasField("error"):
        parts[0] += f" [{finished.error.reason}] {finished.error.message}"
    if finished.HasField("stop_index"):
        parts[0] += f" (sequence {finished.stop_index})"
    short = asked.HasField("max_new_tokens") and finished.output_tokens < asked.max_new_tokens
    if finished.reason == FinishReason.FINISH_REASON_LENGTH and short:
        parts[0] += " (the window is full)"
    parts.append(f"{count(finished.output_tokens, 'token')} after {finished.context_tokens}")
    parts.append(count(finished.attempts, "attempt"))
    if timings.HasField("first_token_ms"):
        parts.append(f"first token after {duration(timings.first_token_ms)}")
    parts.append(f"{duration(timings.total_ms)} in all")
    return ", ".join(parts)
