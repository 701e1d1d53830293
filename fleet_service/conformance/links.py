"""Rules of multiplexed links: the features LINK and RESUME."""

from __future__ import annotations

from fleet.v1 import admin_service_pb2 as admin_pb
from fleet.v1 import link_pb2
from fleet_service.conformance.generations import OUTPUT_TOKENS
from fleet_service.conformance.head import Head
from fleet_service.conformance.link_client import LinkClient, LinkRun, link_of
from fleet_service.conformance.requests import finish_name, refusal_text
from fleet_service.conformance.sessions import DONE, UNKNOWN, refused
from fleet_service.conformance.stream import BY_ITSELF
from fleet_service.conformance.verdicts import Broken, Rule, Skipped, Untried, expect

_UNKNOWN_TYPE = 1_000_000
_TOKENS_BEFORE_THE_LOSS = 3


async def hello(head: Head) -> None:
    head.connection.need(admin_pb.NODE_FEATURE_LINK)
    async with link_of(head) as link:
        plain = head.connection.hello
        same = (link.hello.identity, link.hello.incarnation) == (plain.identity, plain.incarnation)
        expect(same, "the hello of the link names another node or run than the handshake")
        expect(list(link.hello.features) == list(plain.features), "the hello announces other features")


async def commands(head: Head) -> None:
    head.connection.need(admin_pb.NODE_FEATURE_LINK)
    session = head.session()
    tokens = head.connection.tokens(6)
    async with link_of(head) as link:
        refused(
            "Append over a link", (await link.command("append", session.append_request([]))).refusal, UNKNOWN
        )
        refused("Assign over a link", (await link.command("assign", session.assign_request())).refusal, DONE)
        append = session.append_request(tokens)
        answer = await link.command("append", append)
        refused("Append over a link", answer.refusal, DONE)
        expect(answer.context_length == len(tokens), f"context_length is {answer.context_length}")
        session.context = tokens
        head.doing = "waiting for the end of a run over the link"
        run = await _generate(link, session.generate_request(OUTPUT_TOKENS))
        expect(run.epoch == session.epoch, f"the run has epoch {run.epoch}, the binding's is {session.epoch}")
        await link.to_end(run)
        _check_run(run)


async def unknown_frames(head: Head) -> None:
    head.connection.need(admin_pb.NODE_FEATURE_LINK)
    session = head.session()
    unknown = link_pb2.HeadFrame(type=_UNKNOWN_TYPE)  # type: ignore[arg-type] # of a later version
    async with link_of(head) as link:
        await link.send(unknown)
        try:
            answer = await link.command("append", session.append_request([]))
        except Broken as broken:
            raise Broken(f"after a frame of an unknown type, to be skipped: {broken}") from broken
        refused("Append after a frame of an unknown type", answer.refusal, UNKNOWN)
        unknown.must_understand = True
        await link.send(unknown)
        head.doing = "waiting for the end of a link with an unknown frame that must be understood"
        try:
            while True:
                await link.read()
        except Broken as broken:
            if "the link ended" not in str(broken):
                raise


async def link_reports(head: Head) -> None:
    head.connection.need(admin_pb.NODE_FEATURE_LINK)
    async with link_of(head) as link:
        head.doing = "waiting for the second report over the link"
        while link.reports < 2:
            await link.read()


async def resume(head: Head) -> None:
    head.connection.need(admin_pb.NODE_FEATURE_LINK)
    head.connection.need(admin_pb.NODE_FEATURE_RESUME)
    session = await head.bound()
    async with head.again() as other, link_of(head, other.connection) as link:
        run = await _generate(link, session.generate_request(head.long_run(session), generation_id="long"))
        while len(run.tokens) < _TOKENS_BEFORE_THE_LOSS and run.end is None:
            await link.read()
        if run.end is not None and run.end.finish in BY_ITSELF:
            raise Skipped("its generations are over before the link can be lost")
        before = list(run.tokens)
        link.close()
    lacked = _TOKENS_BEFORE_THE_LOSS - 1  # the last token before the loss is asked for again
    request = session.generate_request(
        head.long_run(session),
        generation_id="long",
        first_index=lacked,
        prefix_token_ids=before[:lacked],
    )
    async with link_of(head) as link:
        try:
            run = await _generate(link, request)
        except Untried as untried:
            raise Broken(f"a run whose link was lost is not taken up: {untried}") from untried
        expect(run.resumed, "a run whose link was lost was started anew, not taken up")
        while len(run.tokens) < 2 and run.end is None:
            await link.read()
        expect(run.indexes[:1] == [lacked], f"the run goes on at {run.indexes[:1]}, asked for was {lacked}")
        same = run.tokens[:1] == before[lacked : lacked + 1]
        expect(same, "a token sent before was another when it was sent again")


async def _generate(link: LinkClient, request: object) -> LinkRun:
    accepted = await link.command("generate", request)
    if accepted.HasField("refusal"):
        raise Untried(f"Generate over a link: {refusal_text(accepted.refusal)}")
    return link.run_of(accepted)


def _check_run(run: LinkRun) -> None:
    count = len(run.tokens)
    expect(run.indexes == list(range(count)), f"the indexes of a run are {run.indexes}")
    if run.end is None:
        raise AssertionError("a run that was read to its end has one")
    if run.end.HasField("refusal"):
        raise Broken(f"a run ended with {refusal_text(run.end.refusal)}")
    expect(run.end.finish in BY_ITSELF, f"a run ended with {finish_name(run.end.finish)}")
    expect(run.end.next_index == count, f"next_index is {run.end.next_index} after {count} tokens")


RULES = (
    Rule("N58", "LINK: its hello is that of the handshake", hello),
    Rule("N59", "LINK: answers commands as plain calls do, and sends runs in columns", commands),
    Rule("N60", "LINK: skips frames of unknown types, unless they must be understood", unknown_frames),
    Rule("N61", "LINK: reports over the link as well", link_reports),
    Rule("N62", "RESUME: lets a run outlive its link, and goes on at any index the head lacks", resume),
)
