"""Frames of a multiplexed link: the stream they travel on, the hello first, what breaks the contract.

A dialed node's LinkService.Link and a joining node's JoinService.Join are the same to everything above
FrameStream.
"""

from __future__ import annotations

from typing import Final, Protocol

from fleet.v1 import link_pb2, node_service_pb2
from fleet_service.domain.commands import Introduction
from fleet_service.links import convert
from fleet_service.links.settings import LinkSettings
from fleet_service.links.status import refusal_advice
from fleet_service.runtime.protocols import HandshakeRefusedError, LinkLostError, NodeFaultError
from fleet_service.token import NONCE_BYTES, FleetToken, Way

FRAMES_BEFORE_HELLO = 16
"""Frames of unknown types that a node may send before its hello."""

TOKEN_REFUSED = "FLEET_TOKEN_REFUSED"  # noqa: S105 - a reason of errors.proto

_FROM_NODE: Final = frozenset(
    {link_pb2.FRAME_TYPE_HELLO, link_pb2.FRAME_TYPE_REFUSED, link_pb2.FRAME_TYPE_NEWS}
)
_FROM_HEAD: Final = frozenset({link_pb2.FRAME_TYPE_PROOF, link_pb2.FRAME_TYPE_COMMANDS})


class FrameStream(Protocol):
    """Frames to and from one node, over a connection that either side made."""

    async def send(self, frame: link_pb2.HeadFrame) -> None:
        """Hand a frame to the transport; waits while it is full. Raises a LinkError. One call at a time."""

    async def receive(self) -> link_pb2.NodeFrame | None:
        """The next frame; None once the node has ended the stream in order. Raises a LinkError."""

    async def close(self) -> None:
        """Drop the stream; whoever sends or receives on it is told so by an error."""

    @property
    def encrypted(self) -> bool:
        """Whether it is TLS."""

    @property
    def way(self) -> Way:
        """Which side dialed: the head a "link", the node to "join"."""


class ProtocolViolationError(NodeFaultError):
    """A frame that the contract does not allow. It costs the link; the text says what was wrong with it."""


class HelloError(HandshakeRefusedError):
    """The handshake failed by what the node said; `reason` is one of errors.proto, without the prefix."""

    def __init__(self, text: str, reason: str = "LINK_PROTOCOL_VIOLATED") -> None:
        super().__init__(text)
        self.reason = reason


def is_news(frame: link_pb2.NodeFrame) -> bool:
    """Whether a frame after the hello is to be taken; False: skip it. Raises ProtocolViolationError."""
    if frame.type == link_pb2.FRAME_TYPE_NEWS:
        return True
    if frame.type in _FROM_NODE or frame.type in _FROM_HEAD:
        name = link_pb2.FrameType.Name(frame.type)
        raise ProtocolViolationError(f"the node sent {name} where only NEWS may come")
    _check_skippable(frame)
    return False


async def shake_hands(
    stream: FrameStream, introduction: Introduction, settings: LinkSettings, peer: str
) -> node_service_pb2.HandshakeResponse:
    """Say hello and await the node's, and prove to each other to know the fleet token where there is one.

    The head speaks first, whoever dialed. `peer` names the node in texts. Raises HelloError, also for a peer
    that breaks the contract, and what the stream raises. The time is the caller's to bound.
    """
    hello = convert.link_hello(introduction, settings.report_period_s)
    token = settings.token
    hello.nonce = token.new_nonce() if token else b""
    answer = await _exchange_hellos(stream, hello, peer)
    check_answer(answer, peer)
    if token:
        check_proof(token, stream.way, hello.nonce, answer, peer)
        proof = token.proof(stream.way, hello.nonce, answer.nonce)
        await stream.send(link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_PROOF, proof=proof))
    return answer


async def _exchange_hellos(
    stream: FrameStream, hello: node_service_pb2.HandshakeRequest, peer: str
) -> node_service_pb2.HandshakeResponse:
    await stream.send(link_pb2.HeadFrame(type=link_pb2.FRAME_TYPE_HELLO, hello=hello))
    for _ in range(FRAMES_BEFORE_HELLO):
        frame = await stream.receive()
        if frame is None:
            raise LinkLostError(f"{peer} ended the link without a hello")
        if frame.type == link_pb2.FRAME_TYPE_HELLO:
            if not frame.HasField("hello"):
                raise HelloError(f"{peer} sent a hello without a body: is it a fleet node?")
            return frame.hello
        if frame.type == link_pb2.FRAME_TYPE_REFUSED:
            raise HelloError(_refusal_text(frame.refused, peer), frame.refused.reason[:64])
        if frame.type in _FROM_NODE or frame.type in _FROM_HEAD:
            name = link_pb2.FrameType.Name(frame.type)
            raise HelloError(f"{peer} sent {name} before its hello: is it a fleet node?")
        try:
            _check_skippable(frame)
        except ProtocolViolationError as error:
            raise HelloError(f"{peer}: {error}") from error
    raise HelloError(f"{peer} sent {FRAMES_BEFORE_HELLO} frames and no hello: is it a fleet node?")


def check_answer(answer: node_service_pb2.HandshakeResponse, peer: str) -> None:
    """Raises HelloError when the head cannot work with a node that answers so."""
    if answer.version != convert.PROTOCOL_VERSION:
        raise HelloError(
            f"{peer} speaks protocol version {answer.version}, the head {convert.PROTOCOL_VERSION}:"
            " upgrade the older of the two",
            "VERSION_UNSUPPORTED",
        )
    if not answer.identity or not answer.incarnation:
        raise HelloError(
            f"{peer} gave no identity or incarnation: a node must name itself and each run of its process"
        )


def check_proof(
    token: FleetToken, way: Way, nonce: bytes, answer: node_service_pb2.HandshakeResponse, peer: str
) -> None:
    """Raises HelloError when a node does not prove that it knows the fleet token. `nonce`: the head's."""
    if not answer.proof:
        raise HelloError(
            f"{peer} was refused the handshake: start it with the head's token file, --token-file"
            " (it has no fleet token)",
            TOKEN_REFUSED,
        )
    if len(answer.nonce) != NONCE_BYTES or not token.accepts(way, answer.proof, nonce, answer.nonce):
        raise HelloError(
            f"{peer} was refused the handshake: give both the same fleet token (it has another)",
            TOKEN_REFUSED,
        )


def _check_skippable(frame: link_pb2.NodeFrame) -> None:
    if frame.must_understand:
        raise ProtocolViolationError(
            f"the node sent a frame of type {frame.type} that must be understood, and this head does not:"
            " upgrade the head"
        )


def _refusal_text(refused: link_pb2.LinkRefusal, peer: str) -> str:
    advice = refusal_advice(refused.reason)
    return f"{peer} refused the handshake: {advice} ({refused.reason[:64]} {refused.message[:500]})"
