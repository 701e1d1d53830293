"""An example client of a fleet head: a session, a prompt, an answer that survives what fails on its way.

Needs nothing but the generated stubs and grpcio-status: `.venv/bin/python -m examples.python_client --help`.
The same program in Go, Java and TypeScript lies beside it; README.md has what they share.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fleet.v1 import fleet_service_pb2 as pb
from fleet.v1 import fleet_service_pb2_grpc as rpc
from fleet.v1.types_pb2 import FinishReason

# What the program ends with; wrong use is 2, as argparse has it.
WHOLE = 0  # the answer ended by itself: EOS, STOP, LENGTH
REFUSED = 1  # the head refused; its reason is printed
NOT_REACHED = 3  # the connection failed, or the deadline passed
ENDED_TOO_EARLY = 4  # CANCELLED, WALL_CLOCK, ERROR; the tokens printed stand

# How long a generation waits for its reader to come back, and its reader tries to.
GRACE_S = 10.0

# The codes of a connection that failed; CANCELLED while the head ends.
LOST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)

_Request = TypeVar("_Request")


# ------------------------------------------------------------------------------------------------ connection


def connect(address: str, ca_file: Path | None, token_file: Path | None) -> grpc.Channel:
    """A channel with TLS where there is a CA file, and a token on every call where there is a token file.

    It connects on the first call, and anew when the connection breaks.
    """
    # Published beside the contract: timeouts, and which calls are tried again by gRPC itself.
    service_config = files("fleet.v1").joinpath("service_config.json").read_text(encoding="utf-8")
    options = [
        ("grpc.service_config", service_config),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Tells a connection that has died in silence; without calls nothing is sent.
        ("grpc.keepalive_time_ms", 15_000),
        ("grpc.keepalive_timeout_ms", 5_000),
    ]
    if ca_file is None:
        return grpc.insecure_channel(address, options)
    secure = grpc.ssl_channel_credentials(ca_file.read_bytes())
    if token_file is not None:
        token = token_file.read_text(encoding="utf-8").strip()
        # Sent as `authorization: Bearer TOKEN`, over TLS only.
        secure = grpc.composite_channel_credentials(secure, grpc.access_token_call_credentials(token))
    return grpc.secure_channel(address, secure, options)


# ---------------------------------------------------------------------------------------------------- errors


@dataclass
class Refusal:
    """What a head says with an error. Branch on the reason, never on the message."""

    code: grpc.StatusCode
    message: str
    reason: str = ""  # empty where the head said nothing: the connection failed, or the deadline passed
    metadata: dict[str, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    retry_after_s: float | None = None  # None: asking again does not help

    @property
    def connection_lost(self) -> bool:
        """The connection failed or the head ends, and not the request."""
        return self.reason in {"", "HEAD_DRAINING"} and self.code in LOST

    def __str__(self) -> str:
        if not self.reason:
            return f"failed: {self.code.name}: {self.message}"
        lines = [f"refused: {self.reason}: {self.message}"]
        lines += [f"  {key} = {value}" for key, value in self.metadata.items()]
        lines += [f"  {each}" for each in self.violations]
        if self.retry_after_s is not None:
            lines.append(f"  try again in {self.retry_after_s:.1f} s")
        return "\n".join(lines)


def decode(error: grpc.RpcError) -> Refusal:
    """Take the details out of the error of a call."""
    said = Refusal(error.code(), error.details() or "")
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad = error_details_pb2.BadRequest()
    status = rpc_status.from_call(cast("grpc.Call", error))  # an error of a call is both
    for detail in status.details if status else ():
        if detail.Unpack(info):
            said.reason, said.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            said.retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
        elif detail.Unpack(bad):
            said.violations = [f"{each.field} {each.description}" for each in bad.field_violations]
    return said


# ------------------------------------------------------------------------------------------------ generation


def generate(
    fleet: rpc.FleetServiceStub, request: pb.GenerateRequest, timeout_s: float
) -> Generator[pb.GenerationEvent]:
    """Events of one generation to its end, whatever becomes of the connection and the head.

    Every token comes once and in order, `finished` last. Closing the generator tells the head that we left.
    For that the request needs a request id, and GRACE_S as its disconnect_grace_ms.

    Raises grpc.RpcError. Its reason is DATA_LOSS where the head lost tokens that it gave: those from its
    metadata's nextIndex on are to be dropped.
    """
    deadline_s = time.monotonic() + timeout_s
    place = pb.AttachGenerationRequest()  # takes it up behind all that came
    lost_at_s = wait_s = 0.0  # 0 = the connection is well
    while True:
        remaining_s = deadline_s - time.monotonic()
        call: Any  # a stream of either kind
        if not place.generation_id:
            call = fleet.Generate(request, timeout=remaining_s)
        else:  # once it is known, it is taken up
            call = fleet.AttachGeneration(place, timeout=remaining_s)
        try:
            for response in call:
                event = response.event
                lost_at_s = wait_s = 0.0
                place.branch = event.branch
                kind = event.WhichOneof("event")
                if kind == "accepted":
                    place.generation_id = event.accepted.generation_id
                elif kind == "tokens":
                    place.from_index = event.tokens.first_index + len(event.tokens.token_ids)
                yield event
                if kind == "finished":
                    return
        except grpc.RpcError as error:
            now_s = time.monotonic()
            lost_at_s = lost_at_s or now_s
            if not decode(error).connection_lost or now_s - lost_at_s > GRACE_S:
                raise
        finally:
            call.cancel()
        note(f"connection lost, going on at {place.from_index}")
        time.sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(max(0.1, 2 * wait_s), 1.0)


# --------------------------------------------------------------------------------------------------- the job


def run(fleet: rpc.FleetServiceStub, options: argparse.Namespace) -> pb.Finished:
    """Open a session, append the prompt, print the answer as it comes, and finish the session."""
    # With an id for each request, a call that is tried again is done once.
    run_id = str(uuid.uuid4())
    spec = pb.SessionSpec(model=options.model)
    create = pb.CreateSessionRequest(spec=spec, request_id=f"{run_id}-create")
    session_id = fleet.CreateSession(create).session.session_id
    try:
        fleet.AppendTokens(
            pb.AppendTokensRequest(
                session_id=session_id, token_ids=options.prompt, request_id=f"{run_id}-append"
            )
        )
        return print_answer(fleet, session_id, f"{run_id}-generate", options)
    finally:
        # Frees what the session holds; left alone, it would expire.
        attempt(fleet.FinishSession, pb.FinishSessionRequest(session_id=session_id))


def print_answer(
    fleet: rpc.FleetServiceStub, session_id: str, request_id: str, options: argparse.Namespace
) -> pb.Finished:
    """Print tokens, and cancel when there are enough."""
    request = pb.GenerateRequest(
        session_id=session_id,
        request_id=request_id,
        spec=pb.GenerationSpec(
            max_new_tokens=options.max_tokens,
            max_wall_ms=round(options.deadline * 1000),
            disconnect_grace_ms=round(GRACE_S * 1000),
        ),
    )
    generation_id, count = "", 0
    # The head keeps the time; our own deadline, a little later, is for a head that says nothing.
    with closing(generate(fleet, request, options.deadline + 5)) as events:
        for event in events:
            match event.WhichOneof("event"):
                case "accepted":
                    generation_id = event.accepted.generation_id
                case "started":
                    note(f"started on {event.started.node}")
                case "moved":
                    note(f"moved from {event.moved.from_node} to {event.moved.to_node}")
                case "tokens":
                    before, count = count, count + len(event.tokens.token_ids)
                    print(*event.tokens.token_ids, sep="\n", flush=True)
                    if before < options.cancel_after <= count:
                        # The stream goes on to its end, which then is CANCELLED.
                        cancel = pb.CancelGenerationRequest(generation_id=generation_id)
                        attempt(fleet.CancelGeneration, cancel)
                case "finished":
                    return event.finished
    raise AssertionError("`finished` is the last event")


def tell_finish(finished: pb.Finished) -> int:
    """Print how a generation ended and give the exit code."""
    reason = FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_")
    note(f"finished: {reason}, {finished.output_tokens} tokens")
    if finished.HasField("error"):
        note(f"{finished.error.reason}: {finished.error.message}")
    return WHOLE if reason in {"EOS", "STOP", "LENGTH"} else ENDED_TOO_EARLY


def attempt(call: Callable[[_Request], object], request: _Request) -> None:
    """Make a call whose failure changes nothing: it is told, and that is all."""
    try:
        call(request)
    except grpc.RpcError as error:
        note(str(decode(error)))


def note(text: str) -> None:
    print(text, file=sys.stderr)


def token_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.python_client", description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:8455", metavar="HOST:PORT", help="the head")
    parser.add_argument(
        "--ca", type=Path, help="certificate authority to believe; without it there is no TLS"
    )
    parser.add_argument("--token-file", type=Path, help="holds the token to show; needs --ca")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompt", type=token_ids, default="1,2,3", help="token ids, separated by commas")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds the answer may take in all")
    parser.add_argument("--cancel-after", type=int, default=0, help="cancel at so many tokens; 0 = never")
    options = parser.parse_args()
    if options.token_file and not options.ca:
        parser.error("--token-file needs --ca: a token is shown over TLS only")
    with connect(options.address, options.ca, options.token_file) as channel:
        try:
            return tell_finish(run(rpc.FleetServiceStub(channel), options))
        except grpc.RpcError as error:
            said = decode(error)
            note(str(said))
            return REFUSED if said.reason else NOT_REACHED
        except BrokenPipeError:
            # Who read the tokens has enough, `head` for instance. What is not written is not tried again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ENDED_TOO_EARLY


if __name__ == "__main__":
    sys.exit(main())
