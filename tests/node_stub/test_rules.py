"""The node rules, command by command."""

import zlib
from array import array
from dataclasses import replace
from typing import Any

import pytest

from node_stub.rules import (
    Admission,
    Append,
    Assign,
    Code,
    Context,
    Fenced,
    Generate,
    Limits,
    Model,
    NodeRules,
    Owner,
    Refusal,
    Sampling,
    Stopped,
    context_crc32,
)

TERM = 7
E1, E2, E3 = (TERM << 32 | n for n in (1, 2, 3))
OWNER = Owner("fleet", "head", TERM)
MODEL = Model("m", "r1", vocab_size=1000, max_context_tokens=64)


def assign(epoch: int = E1, command_id: int = 1, session_id: str = "s", **changes: Any) -> Assign:
    command = Assign(session_id, epoch, command_id, "fleet", "head", "m", "r1", lease_ms=1000)
    return replace(command, **changes)


def append(
    tokens: list[int], base: int = 0, epoch: int = E1, command_id: int = 2, session_id: str = "s"
) -> Append:
    return Append(session_id, epoch, command_id, base, tokens)


def generate(
    context: list[int],
    epoch: int = E1,
    command_id: int = 3,
    generation_id: str = "g",
    **changes: Any,
) -> Generate:
    crc = context_crc32(context)
    command = Generate("s", epoch, command_id, generation_id, len(context), crc, max_new_tokens=8)
    return replace(command, **changes)


@pytest.fixture
def rules() -> NodeRules:
    return NodeRules([MODEL], Limits(default_lease_ms=1000))


@pytest.fixture
def bound(rules: NodeRules) -> NodeRules:
    assert rules.assign(assign(), 0) is None
    assert rules.append(append([1, 2, 3]), 0) is None
    return rules


def admitted(reply: object) -> Admission:
    assert isinstance(reply, Admission)
    return reply


def refused(reply: object) -> Refusal:
    assert isinstance(reply, Refusal)
    return reply


def code(reply: object) -> Code | None:
    return reply.code if isinstance(reply, Refusal) else None


def test_a_context_keeps_its_crc_as_zlib_gives_it() -> None:
    context = Context()
    for base, tail in [(0, [1, 2, 3]), (3, [4]), (2, [9, 9, 2**32 - 1]), (0, [])]:
        context.replace_tail(base, tail)
        assert context.crc32 == zlib.crc32(array("I", context.token_ids).tobytes())


def test_a_generation_runs_on_context_and_prefix_and_leaves_the_context_as_it_was(bound: NodeRules) -> None:
    command = generate([1, 2, 3], prefix_token_ids=[8, 9], first_index=2, sampling=Sampling(seed=5))
    admission = admitted(bound.generate(command, 0))
    assert list(admission.prompt_token_ids) == [1, 2, 3, 8, 9]
    assert (admission.first_index, admission.max_new_tokens, admission.sampling.seed) == (2, 8, 5)
    assert list(bound.context_of("s")) == [1, 2, 3]
    assert bound.active_runs == 1
    bound.ended("s", E1, "g")
    bound.ended("s", E1, "g")
    assert bound.active_runs == 0


@pytest.mark.parametrize("epoch,expected", [(E1, Code.STALE_EPOCH), (E2, Code.STALE_EPOCH), (E3, None)])
def test_assign_needs_a_strictly_higher_epoch(rules: NodeRules, epoch: int, expected: Code | None) -> None:
    assert rules.assign(assign(epoch=E2), 0) is None
    reply = rules.assign(assign(epoch=epoch, command_id=5), 0)
    assert code(reply) == expected
    assert reply is None or reply.current_epoch == E2


def test_a_new_assign_starts_from_an_empty_context_and_stops_the_older_run(bound: NodeRules) -> None:
    bound.generate(generate([1, 2, 3]), 0)
    assert bound.assign(assign(epoch=E2), 0) is None
    assert list(bound.context_of("s")) == []
    stopped = Stopped("s", E1, "g", Refusal(Code.STALE_EPOCH, current_epoch=E2))
    assert bound.take_effects() == [stopped]
    assert bound.take_effects() == []
    assert bound.judge_emission("s", E1, 0) == stopped.refusal
    assert bound.judge_emission("s", E2, 0) is None
    assert bound.active_runs == 0


def test_the_same_command_again_gets_the_same_reply_and_does_nothing(bound: NodeRules) -> None:
    assert bound.append(append([1, 2, 3]), 0) is None
    assert list(bound.context_of("s")) == [1, 2, 3]
    mismatch = bound.append(append([7], base=9, command_id=3), 0)
    assert mismatch == Refusal(Code.CONTEXT_MISMATCH, context_length=3)
    assert bound.append(append([7], base=9, command_id=3), 0) == mismatch
    again = bound.assign(assign(), 0)
    assert code(again) == Code.REPLAYED


def test_the_same_assign_again_is_done_again(rules: NodeRules) -> None:
    assert rules.assign(assign(), 0) is None
    assert rules.assign(assign(), 5) is None


@pytest.mark.parametrize(
    "command", [append([7], command_id=1), append([7]), generate([1, 2, 3], command_id=2)]
)
def test_a_lower_command_id_or_another_command_under_the_last_id_is_replayed(
    bound: NodeRules, command: Append | Generate
) -> None:
    reply = bound.generate(command, 0) if isinstance(command, Generate) else bound.append(command, 0)
    assert code(reply) == Code.REPLAYED
    assert list(bound.context_of("s")) == [1, 2, 3]


@pytest.mark.parametrize("command_id", [3, 4])
def test_a_known_generation_never_starts_a_second_run(bound: NodeRules, command_id: int) -> None:
    bound.generate(generate([1, 2, 3]), 0)
    assert code(bound.generate(generate([1, 2, 3], command_id=command_id), 0)) == Code.REPLAYED
    bound.ended("s", E1, "g")
    assert code(bound.generate(generate([1, 2, 3], command_id=command_id + 1), 0)) == Code.REPLAYED
    assert bound.active_runs == 0


def test_under_a_higher_epoch_the_same_generation_may_run_again(bound: NodeRules) -> None:
    bound.generate(generate([1, 2, 3]), 0)
    bound.assign(assign(epoch=E2), 0)
    bound.append(append([1, 2, 3], epoch=E2), 0)
    assert admitted(bound.generate(generate([1, 2, 3], epoch=E2), 0)).epoch == E2


@pytest.mark.parametrize("epoch", [E1 - 1, E2])
def test_append_generate_and_cancel_need_the_exact_epoch(bound: NodeRules, epoch: int) -> None:
    stale = Refusal(Code.STALE_EPOCH, current_epoch=E1)
    assert bound.append(append([5], epoch=epoch), 0) == stale
    assert bound.generate(generate([1, 2, 3], epoch=epoch), 0) == stale
    assert bound.cancel("s", epoch, "g", 0).refusal == stale


def test_an_unknown_session_is_said_to_be_unknown(rules: NodeRules) -> None:
    for reply in (rules.append(append([5]), 0), rules.generate(generate([]), 0), rules.revoke("s", E1, 0)):
        assert code(reply) == Code.UNKNOWN_SESSION
    assert code(rules.cancel("s", E1, "g", 0).refusal) == Code.UNKNOWN_SESSION
    assert code(rules.judge_emission("never", E1, 0)) == Code.UNKNOWN_SESSION


@pytest.mark.parametrize("context", [[1, 2], [1, 2, 4], [3, 2, 1], []])
def test_generate_on_another_context_is_refused_with_the_nodes_length(
    bound: NodeRules, context: list[int]
) -> None:
    assert bound.generate(generate(context), 0) == Refusal(Code.CONTEXT_MISMATCH, context_length=3)


def test_append_keeps_the_base_and_replaces_what_follows(bound: NodeRules) -> None:
    assert bound.append(append([8, 9], base=1, command_id=4), 0) is None
    assert list(bound.context_of("s")) == [1, 8, 9]
    assert refused(bound.append(append([], base=4, command_id=5), 0)).context_length == 3


def test_what_does_not_fit_the_window_is_refused_with_the_window(bound: NodeRules) -> None:
    too_long = Refusal(Code.CONTEXT_TOO_LONG, max_context_tokens=64)
    assert bound.append(append([1] * 62, base=3, command_id=4), 0) == too_long
    assert bound.append(append([1] * 61, base=3, command_id=5), 0) is None
    context = [1, 2, 3] + [1] * 61
    reply = bound.generate(generate(context, command_id=6, prefix_token_ids=[1], first_index=1), 0)
    assert reply == too_long
    assert admitted(bound.generate(generate(context, command_id=7), 0)).max_new_tokens == 0


@pytest.mark.parametrize(
    "changes",
    [{"model": "other"}, {"model_revision": "r2"}],
)
def test_a_model_not_served_is_a_constraint(rules: NodeRules, changes: dict[str, Any]) -> None:
    assert code(rules.assign(assign(**changes), 0)) == Code.CONSTRAINT
    assert rules.holdings() == []


def test_bad_ids_and_a_wrong_first_index_are_constraints(bound: NodeRules) -> None:
    assert code(bound.append(append([1000], command_id=3), 0)) == Code.CONSTRAINT
    wrong = generate([1, 2, 3], command_id=4, prefix_token_ids=[1000], first_index=1)
    assert code(bound.generate(wrong, 0)) == Code.CONSTRAINT
    assert code(bound.generate(generate([1, 2, 3], command_id=5, first_index=1), 0)) == Code.CONSTRAINT


def test_revoke_frees_the_session_stops_its_run_and_bars_its_epoch_for_two_leases(bound: NodeRules) -> None:
    bound.generate(generate([1, 2, 3]), 0)
    assert bound.revoke("s", E2, 10) is None
    stale = Refusal(Code.STALE_EPOCH, current_epoch=E2, detail="revoked")
    assert bound.take_effects() == [Stopped("s", E1, "g", stale)]
    assert bound.holdings() == []
    assert (bound.context_blocks, bound.active_runs) == (0, 0)
    assert code(bound.judge_emission("s", E1, 10)) == Code.STALE_EPOCH
    assert bound.assign(assign(epoch=E2), 2009) == Refusal(Code.STALE_EPOCH, current_epoch=E2)
    assert bound.assign(assign(epoch=E3), 2009) is None
    assert bound.revoke("s", E3, 2009) is None


def test_a_tombstone_ends_after_two_leases(bound: NodeRules) -> None:
    assert bound.revoke("s", E2, 10) is None
    assert bound.assign(assign(epoch=E2), 2010) is None


def test_a_revoke_needs_an_epoch_not_below_the_sessions_own(bound: NodeRules) -> None:
    assert bound.revoke("s", E1 - 1, 0) == Refusal(Code.STALE_EPOCH, current_epoch=E1)
    assert list(bound.context_of("s")) == [1, 2, 3]


def test_a_revoke_that_overtakes_its_assign_bars_it(rules: NodeRules) -> None:
    assert code(rules.revoke("s", E2, 0)) == Code.UNKNOWN_SESSION
    assert rules.assign(assign(epoch=E1), 5) == Refusal(Code.STALE_EPOCH, current_epoch=E2)
    assert code(rules.revoke("s", E1, 5)) == Code.UNKNOWN_SESSION
    assert rules.assign(assign(epoch=E2), 5) == Refusal(Code.STALE_EPOCH, current_epoch=E2)
    assert rules.assign(assign(epoch=E3), 5) is None


def test_an_expired_lease_fences_its_sessions_and_frees_their_contexts(bound: NodeRules) -> None:
    bound.generate(generate([1, 2, 3]), 0)
    assert bound.judge_emission("s", E1, 999) is None
    assert code(bound.judge_emission("s", E1, 1000)) == Code.FENCED
    effects = bound.take_effects()
    assert effects[0] == Fenced("s", E1)
    assert isinstance(effects[1], Stopped)
    assert effects[1].refusal.code == Code.FENCED
    assert bound.context_blocks == 0
    assert [(h.fenced, h.context_length) for h in bound.holdings()] == [(True, 0)]
    assert code(bound.append(append([5], command_id=9), 1000)) == Code.FENCED
    assert code(bound.generate(generate([1, 2, 3], command_id=9), 1000)) == Code.FENCED
    assert code(bound.cancel("s", E1, "g", 1000).refusal) == Code.FENCED
    assert code(bound.assign(assign(), 1000)) == Code.FENCED


def test_an_expired_lease_cannot_be_renewed_but_a_new_assign_starts_one(bound: NodeRules) -> None:
    assert bound.renew_lease(OWNER, 1000, 900)
    assert bound.renew_lease(OWNER, 1000, 1899)
    assert not bound.renew_lease(OWNER, 1000, 2899)
    assert bound.live_sessions(OWNER) == 0
    assert bound.assign(assign(epoch=E2, session_id="t"), 2900) is None
    assert bound.renew_lease(OWNER, 1000, 3000)
    assert bound.live_sessions(OWNER) == 1
    assert code(bound.append(append([5], command_id=9), 3000)) == Code.FENCED


def test_each_term_has_a_lease_of_its_own(rules: NodeRules) -> None:
    other = (TERM + 1) << 32 | 1
    rules.assign(assign(), 0)
    rules.assign(assign(session_id="t", epoch=other), 0)
    assert rules.renew_lease(OWNER, 1000, 500)
    rules.expire(1200)
    assert {h.session_id: h.fenced for h in rules.holdings()} == {"s": False, "t": True}
    assert not rules.renew_lease(Owner("fleet", "head", TERM + 9), 1000, 1200)


def test_a_fenced_record_is_forgotten_after_two_leases(bound: NodeRules) -> None:
    bound.expire(1000)
    bound.expire(2999)
    assert len(bound.holdings()) == 1
    bound.expire(4000)
    assert bound.holdings() == []


def test_cancel_says_whether_a_run_was_there_and_holds_for_a_generate_still_on_its_way(
    bound: NodeRules,
) -> None:
    bound.generate(generate([1, 2, 3]), 0)
    assert bound.cancel("s", E1, "g", 0).was_running
    outcome = bound.cancel("s", E1, "later", 0)
    assert (outcome.refusal, outcome.was_running) == (None, False)
    late = generate([1, 2, 3], command_id=9, generation_id="later")
    assert code(bound.generate(late, 0)) == Code.REPLAYED


def test_a_generate_may_bring_its_assign_and_append(rules: NodeRules) -> None:
    whole = generate([4, 5], assign=assign(), append=append([4, 5]))
    assert list(admitted(rules.generate(whole, 0)).prompt_token_ids) == [4, 5]
    assert code(rules.generate(whole, 0)) == Code.REPLAYED
    assert rules.active_runs == 1


def test_a_part_that_is_refused_refuses_the_whole_the_same_way_each_time(rules: NodeRules) -> None:
    whole = generate([4, 5], assign=assign(), append=append([4, 5], base=1))
    refused = rules.generate(whole, 0)
    assert refused == Refusal(Code.CONTEXT_MISMATCH, context_length=0)
    assert rules.generate(whole, 0) == refused
    stray = generate([4, 5], command_id=9, append=append([4, 5], epoch=E2))
    assert code(rules.generate(stray, 0)) == Code.CONSTRAINT
    stale = generate([], epoch=E1 - 1, assign=assign(epoch=E1 - 1))
    assert code(rules.generate(stale, 0)) == Code.STALE_EPOCH


def test_full_tables_answer_busy_and_fenced_records_make_room() -> None:
    rules = NodeRules([MODEL], Limits(max_sessions=2, max_runs=1, kv_blocks_total=2))
    rules.assign(assign(), 0)
    rules.assign(assign(session_id="t", epoch=(TERM + 1) << 32, lease_ms=5000), 0)
    third = assign(session_id="u", epoch=E2)
    busy = refused(rules.assign(third, 0))
    assert busy.code == Code.BUSY
    assert busy.retry_after_ms > 0
    rules.append(append([1] * 17), 0)
    assert code(rules.append(append([1], epoch=(TERM + 1) << 32, session_id="t"), 0)) == Code.BUSY
    rules.generate(generate([1] * 17), 0)
    second = generate([1] * 17, command_id=9, generation_id="h")
    assert code(rules.generate(second, 0)) == Code.BUSY
    assert rules.assign(third, 1000) is None
    assert {h.session_id for h in rules.holdings()} == {"t", "u"}


def test_a_command_that_was_refused_stays_refused_under_its_id() -> None:
    rules = NodeRules([MODEL], Limits(kv_blocks_total=1))
    rules.assign(assign(), 0)
    rules.assign(assign(session_id="t"), 0)
    rules.append(append([1] * 16), 0)
    late = append([1], session_id="t")
    assert code(rules.append(late, 0)) == Code.BUSY
    rules.revoke("s", E1, 0)
    assert code(rules.append(late, 0)) == Code.BUSY
    assert rules.append(replace(late, command_id=3), 0) is None


def test_a_sessions_id_is_not_taken_from_another_fleet_while_it_lives(bound: NodeRules) -> None:
    foreign = assign(epoch=E3, fleet_id="other")
    assert code(bound.assign(foreign, 0)) == Code.BUSY
    assert bound.assign(foreign, 1000) is None


def test_the_highest_epoch_is_known_per_fleet_and_outlives_the_session(rules: NodeRules) -> None:
    assert rules.highest_epoch("fleet") == 0
    rules.assign(assign(epoch=E2), 0)
    assert (rules.highest_epoch("fleet"), rules.highest_epoch("other")) == (E2, 0)
    rules.revoke("s", E2, 0)
    assert rules.highest_epoch("fleet") == E2
    rules.revoke("unknown", E3, 0)
    assert rules.highest_epoch("other") == E3


def test_tombstones_stay_within_their_bound() -> None:
    rules = NodeRules([MODEL], Limits(max_tombstones=3, default_lease_ms=1000))
    for n in range(10):
        rules.revoke(f"s{n}", E2, n)
    assert code(rules.assign(assign(session_id="s9"), 20)) == Code.STALE_EPOCH
    assert rules.assign(assign(session_id="s0"), 20) is None
