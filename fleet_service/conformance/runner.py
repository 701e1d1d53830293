"""Runs the rules against one node, each within its time, and leaves nothing of it behind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc

from fleet.v1 import node_service_pb2 as pb
from fleet.v1 import node_service_pb2_grpc, types_pb2
from fleet_service.client import decode_error
from fleet_service.conformance import (
    cancels,
    contexts,
    engine,
    features,
    generations,
    handshake,
    leases,
    links,
    reports,
    sessions,
)
from fleet_service.conformance.engine import Answer
from fleet_service.conformance.head import (
    DEFAULT_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    TERM,
    Connect,
    Connection,
    Head,
    Metadata,
    status_text,
)
from fleet_service.conformance.verdicts import Broken, Outcome, Result, Rule, Skipped, Untried
from fleet_service.grpc_causes import (
    CERTIFICATE_NAME,
    CERTIFICATE_UNKNOWN,
    CLOSED,
    NOT_TLS,
    connection_cause,
)
from fleet_service.tls import ClientTls
from fleet_service.token import NONCE_BYTES, PROOF_KEY, FleetToken

_CLEAN_UP_S = 3.0
_RULE_NUMBER = re.compile(r"N(\d+)")
_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.max_receive_message_length", DEFAULT_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
)


class NodeUnusableError(Exception):
    """Nothing can be checked: no node answers there. The text says why."""


class WrongUseError(Exception):
    """The check was asked for in a way that this node cannot serve. The text says what to give."""


@dataclass(frozen=True, slots=True)
class Target:
    """The node, and who asks: `name` begins the names of all heads and sessions, and is new each time.

    `fleet_id` "" = the name; `model` "" = the first it names; `timeout_s` is each rule's time.
    """

    address: str
    name: str
    fleet_id: str = ""
    model: str = ""
    token: FleetToken | None = None
    tls: ClientTls | None = None
    timeout_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that was found of a node."""

    identity: str
    incarnation: str
    model: str
    results: Sequence[Result]
    engine: dict[str, Answer]
    """Only where all rules were asked for."""

    @property
    def holds(self) -> bool:
        """Every rule that is this node's holds, and none was left untried."""
        return not any(each.outcome is Outcome.BROKEN or each.untried for each in self.results)


def all_rules() -> tuple[Rule, ...]:
    """Every rule, by its number."""
    modules = (handshake, sessions, contexts, generations, cancels, leases, reports, features, links)
    found = [rule for module in modules for rule in module.RULES]
    return (*sorted(found, key=_order), *features.LAST)


async def check_node(target: Target, only: Collection[str], on_result: Callable[[Result], None]) -> Verdict:
    """Check the rules whose numbers are in `only`, or all when it is empty; each is told as it is known.

    Raises NodeUnusableError, WrongUseError and TlsError.
    """
    results = []
    rules = [rule for rule in all_rules() if not only or rule.number in only]
    async with _connection(target) as connection:
        for n, rule in enumerate(rules):
            result = await _checked(
                rule, Head(connection, _name(target, n), _connect(target)), target.timeout_s
            )
            results.append(result)
            on_result(result)
        found: dict[str, Answer] = {}
        if not only:
            found = await _engine(Head(connection, _name(target, len(rules)), _connect(target)), target)
    hello = connection.hello
    return Verdict(hello.identity, hello.incarnation, connection.model.name, results, found)


async def _checked(rule: Rule, head: Head, timeout_s: float) -> Result:
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    def result(outcome: Outcome, seen: str = "", *, untried: bool = False) -> Result:
        return Result(rule.number, rule.what, outcome, seen, untried, loop.time() - began_s)

    try:
        async with asyncio.timeout(timeout_s):
            await rule.check(head)
    except Broken as broken:
        return result(Outcome.BROKEN, str(broken))
    except Skipped as skipped:
        return result(Outcome.SKIPPED, str(skipped))
    except Untried as untried:
        return result(Outcome.SKIPPED, f"could not be tried: {untried}", untried=True)
    except TimeoutError:
        if head.is_preparing:
            return result(Outcome.SKIPPED, f"could not be tried: {_waited(head, timeout_s)}", untried=True)
        return result(Outcome.BROKEN, _waited(head, timeout_s))
    finally:
        await _clean_up(head)
    return result(Outcome.OK)


def _waited(head: Head, timeout_s: float) -> str:
    return f"{timeout_s:g} s were over while {head.doing}"


async def _clean_up(head: Head) -> None:
    try:
        async with asyncio.timeout(_CLEAN_UP_S):
            await head.clean_up()
    except TimeoutError:
        pass  # a node that hangs is told by its rules


async def _engine(head: Head, target: Target) -> dict[str, Answer]:
    try:
        async with asyncio.timeout(target.timeout_s):
            return await engine.found(head)
    except TimeoutError:
        return dict.fromkeys(engine.PROPERTIES, Answer.UNKNOWN)
    finally:
        await _clean_up(head)


# ------------------------------------------------------------------------------------------------ connections


@asynccontextmanager
async def _connection(target: Target) -> AsyncIterator[Connection]:
    """A channel that has shaken hands. Raises NodeUnusableError, WrongUseError, TlsError."""
    channel = _channel(target)
    try:
        async with asyncio.timeout(target.timeout_s):
            yielded = await _shake_hands(target, channel)
    except TimeoutError:
        await channel.close()
        raise NodeUnusableError(f"{target.address} did not answer in {target.timeout_s:g} s") from None
    except BaseException:
        await channel.close()
        raise
    async with channel:
        yield yielded


def _connect(target: Target) -> Connect:
    @asynccontextmanager
    async def connect() -> AsyncIterator[Connection]:
        async with AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(_connection(target))
            except (NodeUnusableError, WrongUseError) as error:
                raise Broken(f"a second connection: {error}") from error
            yield connection

    return connect


def _channel(target: Target) -> grpc.aio.Channel:
    options = list(_CHANNEL_OPTIONS)
    if target.tls is None:
        return grpc.aio.insecure_channel(target.address, options=options)
    more = [*options, *target.tls.channel_options()]
    return grpc.aio.secure_channel(target.address, target.tls.credentials(), options=more)


async def _shake_hands(target: Target, channel: grpc.aio.Channel) -> Connection:
    token = target.token
    request = pb.HandshakeRequest(
        min_version=PROTOCOL_VERSION,
        max_version=PROTOCOL_VERSION,
        fleet_id=target.fleet_id or target.name,
        head_id=target.name,
        term=TERM,
        nonce=token.new_nonce() if token else b"",
    )
    stub = node_service_pb2_grpc.NodeServiceStub(channel)
    try:
        hello = await stub.Handshake(request)
    except grpc.aio.AioRpcError as error:
        raise _explained(error, target) from error
    proof: Metadata = ()
    if token:
        # A wrong proof of the node's is told by its rule; a nonce of any length still makes ours.
        proof = ((PROOF_KEY, request.nonce + token.proof("plain", request.nonce, hello.nonce[:NONCE_BYTES])),)
    return Connection(channel, request.fleet_id, hello, _model(target, hello), token, proof)


def _model(target: Target, hello: pb.HandshakeResponse) -> types_pb2.Model:
    served = [model.name for model in hello.models]
    if target.model and target.model not in served:
        raise WrongUseError(f"it serves no model {target.model!r}, but {', '.join(served) or 'none'}")
    wanted = [model for model in hello.models if target.model in {"", model.name}]
    return wanted[0] if wanted else types_pb2.Model()


# What to do about a connection that does not come about, though something listens.
_TLS_ADVICE = {
    CLOSED: "it may speak TLS (give --node-ca FILE), or ask for a certificate (--node-cert, --node-key)",
    CERTIFICATE_UNKNOWN: "name what signed it with --node-ca FILE",
    CERTIFICATE_NAME: "give the name it has with --server-name",
    NOT_TLS: "leave --node-ca out",
}


def _explained(error: grpc.aio.AioRpcError, target: Target) -> Exception:
    match error.code():
        case grpc.StatusCode.UNAUTHENTICATED:
            what = "another fleet token" if target.token else "a fleet token"
            return WrongUseError(f"it has {what}; give its file with --token-file")
        case grpc.StatusCode.UNAVAILABLE:
            cause = connection_cause(error.details() or "") or status_text(error)
            if advice := _TLS_ADVICE.get(cause):
                return NodeUnusableError(f"something listens at {target.address}, but {cause}; {advice}")
            return NodeUnusableError(f"no node answers at {target.address} ({cause})")
        case grpc.StatusCode.UNIMPLEMENTED:
            return NodeUnusableError(f"what listens at {target.address} serves no fleet.v1.NodeService")
        case grpc.StatusCode.FAILED_PRECONDITION:
            if own := decode_error(error).metadata.get("nodeFleetId"):
                return WrongUseError(f"give --fleet-id {own}: the node serves that fleet and no other")
            return WrongUseError(f"it refuses this head: {error.details()}")
        case _:
            return NodeUnusableError(f"Handshake with {target.address} ended with {status_text(error)}")


def _name(target: Target, n: int) -> str:
    return f"{target.name}-{n}"


def _order(rule: Rule) -> int:
    number = _RULE_NUMBER.fullmatch(rule.number)
    if number is None:
        raise AssertionError(f"{rule.number} is no rule's number")
    return int(number[1])
