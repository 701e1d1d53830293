"""Rules of the handshake and the fleet token."""

from __future__ import annotations

from typing import Any

import grpc

from fleet.v1 import node_service_pb2 as pb
from fleet_service.conformance.head import PROTOCOL_VERSION, TERM, Head, status_text
from fleet_service.conformance.requests import epoch_of
from fleet_service.conformance.verdicts import Broken, Rule, Skipped, expect
from fleet_service.token import NONCE_BYTES, PROOF_KEY

_NO_VERSION = 2**32 - 1
_NEWEST = 1_000


async def version(head: Head) -> None:
    wide = await _answered(head, max_version=_NEWEST)
    expect(PROTOCOL_VERSION <= wide.version <= _NEWEST, f"1 to {_NEWEST} offered, {wide.version} chosen")
    own = await _answered(head)
    expect(own.version == PROTOCOL_VERSION, f"only version 1 offered, {own.version} chosen")
    try:
        answer = await head.handshake(min_version=_NO_VERSION, max_version=_NO_VERSION)
    except grpc.aio.AioRpcError as error:
        refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
        expect(refused, f"a head without a common version got {status_text(error)}")
    else:
        raise Broken(f"a head without a common version was answered with version {answer.version}")


async def identity(head: Head) -> None:
    seen = [head.connection.hello, await _answered(head)]
    async with head.again() as other:
        seen.append(await _answered(other))
    expect(all(hello.identity and hello.incarnation for hello in seen), "identity or incarnation is empty")
    names = {(hello.identity, hello.incarnation) for hello in seen}
    expect(len(names) == 1, f"{len(seen)} handshakes told {len(names)} identities or incarnations")


async def models(head: Head) -> None:
    hello = head.connection.hello
    expect(hello.models, "no model is named")
    names = [model.name for model in hello.models]
    expect(all(names), "a model has no name")
    expect(len(set(names)) == len(names), "a model is named twice")
    for model in hello.models:
        outside = [token for token in model.eos_token_ids if model.vocab_size and token >= model.vocab_size]
        expect(not outside, f"{model.name}: EOS {outside} is outside of its {model.vocab_size} ids")
    expect(len(set(hello.features)) == len(hello.features), "a feature is announced twice")
    expect(hello.HasField("report"), "there is no report")


async def highest_epoch(head: Head) -> None:
    session = head.session()
    session.move(7_000)
    with head.preparing():
        await session.bind(head.connection.tokens(4))
    told = (await _answered(head)).highest_epoch
    expect(told >= session.epoch, f"epoch {session.epoch} was assigned, highest_epoch is {told}")
    revoked = epoch_of(TERM, 8_000)
    await session.revoke(revoked)
    told = (await _answered(head)).highest_epoch
    expect(told >= revoked, f"epoch {revoked} was revoked, highest_epoch is {told}")


async def node_proof(head: Head) -> None:
    token = head.connection.token
    if token is None:
        raise Skipped("no --token-file was given")
    for _ in range(2):  # a proof kept from the first handshake is wrong in the second
        nonce = token.new_nonce()
        answer = await _answered(head, nonce=nonce)
        expect(len(answer.nonce) == NONCE_BYTES, f"the node's nonce has {len(answer.nonce)} bytes")
        expect(token.accepts("plain", answer.proof, nonce, answer.nonce), "the node's proof is wrong")


async def head_proof(head: Head) -> None:
    token = head.connection.token
    if token is None:
        raise Skipped("no --token-file was given")
    try:
        await head.handshake(nonce=b"")
    except grpc.aio.AioRpcError as error:
        refused = error.code() is grpc.StatusCode.UNAUTHENTICATED
        expect(refused, f"a handshake without a nonce ended with {status_text(error)}")
    else:
        raise Broken("a handshake without a nonce was answered")
    nonce = token.new_nonce()
    wrong = ((PROOF_KEY, nonce + token.proof("plain", nonce, b"\0" * NONCE_BYTES)),)
    for metadata, what in (((), "without a proof"), (wrong, "with a wrong proof")):
        for method, request in _calls(head).items():
            code = await _code(head, method, request, metadata)
            refused = code is grpc.StatusCode.UNAUTHENTICATED
            expect(refused, f"{method} {what} ended with {code.name if code else 'an answer'}")


async def one_fleet(head: Head) -> None:
    await head.bound()
    try:
        await head.handshake(fleet_id=f"{head.connection.fleet_id}-other")
    except grpc.aio.AioRpcError as error:
        refused = error.code() is grpc.StatusCode.FAILED_PRECONDITION
        expect(refused, f"the head of another fleet got {status_text(error)}")
    else:
        raise Broken("it works for one fleet, and the head of another was answered")


async def _answered(head: Head, **fields: Any) -> pb.HandshakeResponse:
    try:
        return await head.handshake(**fields)
    except grpc.aio.AioRpcError as error:
        raise Broken(f"Handshake ended with {status_text(error)}") from error


def _calls(head: Head) -> dict[str, Any]:
    session, fleet_id = head.session(), head.connection.fleet_id
    about: dict[str, Any] = {"session_id": session.session_id, "epoch": session.epoch}
    return {
        "Assign": session.assign_request(),
        "Append": session.append_request([]),
        "Cancel": pb.CancelRequest(generation_id="g", **about),
        "Revoke": pb.RevokeRequest(**about),
        "RenewLease": pb.RenewLeaseRequest(fleet_id=fleet_id, head_id=head.name, term=TERM, lease_ms=1),
        "Generate": session.generate_request(1),
        "WatchStatus": pb.WatchStatusRequest(fleet_id=fleet_id, head_id=head.name, term=TERM),
    }


async def _code(head: Head, method: str, request: Any, metadata: Any) -> grpc.StatusCode | None:
    """The code that a call fails with; None when it is answered."""
    call = getattr(head.stub, method)(request, metadata=metadata)
    try:
        await (call.read() if method in {"Generate", "WatchStatus"} else call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return None


RULES = (
    Rule("N1", "speaks the highest version that both have, refuses a head that has none of its own", version),
    Rule("N2", "names itself and its run, the same in every handshake", identity),
    Rule("N3", "names its models, its features and its load", models),
    Rule("N4", "tells the highest epoch it has seen of the fleet", highest_epoch),
    Rule("N5", "proves that it knows the fleet token", node_proof),
    Rule("N6", "serves no head that does not prove to know the token", head_proof),
    Rule("N7", "refuses heads of another fleet while it works for one", one_fleet),
)
