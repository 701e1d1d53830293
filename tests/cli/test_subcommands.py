"""Commands with subcommands: what `fleet sessions finish` and `cancel` do, and whose an option is."""

from __future__ import annotations

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as fleet_pb2
from tests.cli.conftest import Fleet
from tests.cli.scripted_head import Hang, ScriptedHead
from tests.cli.test_commands import NOT_FOUND, flowing


async def test_sessions_are_finished_and_cancelled_by_their_ids(head: ScriptedHead, fleet: Fleet) -> None:
    head.replies["FinishSession"] = fleet_pb2.FinishSessionResponse()
    ended = await fleet("sessions", "finish", "s1", "s2")
    assert (ended.code, ended.out) == (0, "s1: finished\ns2: finished\n")
    assert [each.session_id for each in head.requests("FinishSession")] == ["s1", "s2"]
    assert (await fleet("sessions", "cancel", "s1")).out == "s1: generates nothing\n"
    busy = fleet_pb2.Session(session_id="s1", generation_id="g1")
    head.replies["GetSession"] = fleet_pb2.GetSessionResponse(session=busy)
    assert (await fleet("sessions", "cancel", "s1")).out == "s1: cancelled\n"
    assert head.requests("CancelGeneration")[0].generation_id == "g1"
    head.replies["FinishSession"] = NOT_FOUND
    ended = await fleet("sessions", "finish", "s9", "s8")
    assert (ended.code, ended.err.count("[SESSION_NOT_FOUND]")) == (1, 2)


async def test_options_before_a_subcommand_count_for_it(head: ScriptedHead, fleet: Fleet) -> None:
    head.replies["ProbeNodes"] = admin.ProbeNodesResponse()
    elsewhere = ("--admin-address", "127.0.0.1:1")
    ended = await fleet("nodes", *elsewhere, "probe")
    assert (ended.code, "no head listens at 127.0.0.1:1" in ended.err) == (1, True)
    ended = await fleet("nodes", *elsewhere, "--json", "probe", "--admin-address", head.admin_address)
    assert (ended.code, ended.out) == (0, '{"probes": []}\n')
    head.replies["FinishSession"] = Hang()
    ended = await fleet("sessions", "--timeout", "0.3", "finish", "s1")
    assert (ended.code, "did not answer in 0.3 s" in ended.err) == (1, True)


async def test_an_option_that_a_subcommand_lacks_is_refused(head: ScriptedHead, fleet: Fleet) -> None:
    for given, option in (
        (("nodes", "--watch", "probe"), "--watch"),
        (("sessions", "--limit", "3", "finish", "s"), "--limit"),
    ):
        ended = await fleet(*given)
        assert (ended.code, f"{option} is for `fleet {given[0]}` alone" in flowing(ended.err)) == (2, True), (
            given
        )
    assert not head.calls
