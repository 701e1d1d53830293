from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.session_table import TABLE, SessionOp, SessionState, Transition, apply

S, O = SessionState, SessionOp  # noqa: E741 - the table below is to be read as a table
stays = {state: Transition(state) for state in S}
gone = Transition(None)
gone_owing = Transition(None, owes_revoke=True)
unbound_owing = Transition(S.UNBOUND, owes_revoke=True)
in_progress, parked, not_parked, fault = (
    Reason.GENERATION_IN_PROGRESS,
    Reason.SESSION_PARKED,
    Reason.SESSION_NOT_PARKED,
    Reason.INTERNAL,
)

CELLS = [
    (S.UNBOUND, O.APPEND, stays[S.UNBOUND]),
    (S.UNBOUND, O.GENERATE, Transition(S.GENERATING)),
    (S.UNBOUND, O.PARK, Transition(S.PARKED)),
    (S.UNBOUND, O.RESUME, not_parked),
    (S.UNBOUND, O.FINISH, gone),
    (S.UNBOUND, O.NODE_LOST, stays[S.UNBOUND]),
    (S.UNBOUND, O.IDLE, stays[S.UNBOUND]),
    (S.UNBOUND, O.EXPIRED, gone),
    (S.UNBOUND, O.GENERATION_ENDED, fault),
    (S.BOUND, O.APPEND, stays[S.BOUND]),
    (S.BOUND, O.GENERATE, Transition(S.GENERATING)),
    (S.BOUND, O.PARK, Transition(S.PARKED, owes_revoke=True)),
    (S.BOUND, O.RESUME, not_parked),
    (S.BOUND, O.FINISH, gone_owing),
    (S.BOUND, O.NODE_LOST, unbound_owing),
    (S.BOUND, O.IDLE, unbound_owing),
    (S.BOUND, O.EXPIRED, gone_owing),
    (S.BOUND, O.GENERATION_ENDED, fault),
    (S.GENERATING, O.APPEND, in_progress),
    (S.GENERATING, O.GENERATE, in_progress),
    (S.GENERATING, O.PARK, in_progress),
    (S.GENERATING, O.RESUME, not_parked),
    (S.GENERATING, O.FINISH, gone_owing),
    (S.GENERATING, O.NODE_LOST, stays[S.GENERATING]),
    (S.GENERATING, O.IDLE, stays[S.GENERATING]),
    (S.GENERATING, O.EXPIRED, stays[S.GENERATING]),
    (S.GENERATING, O.GENERATION_ENDED, Transition(S.BOUND)),
    (S.PARKED, O.APPEND, parked),
    (S.PARKED, O.GENERATE, parked),
    (S.PARKED, O.PARK, stays[S.PARKED]),
    (S.PARKED, O.RESUME, Transition(S.BOUND)),
    (S.PARKED, O.FINISH, gone),
    (S.PARKED, O.NODE_LOST, stays[S.PARKED]),
    (S.PARKED, O.IDLE, stays[S.PARKED]),
    (S.PARKED, O.EXPIRED, gone),
    (S.PARKED, O.GENERATION_ENDED, fault),
]


@pytest.mark.parametrize("state, op, outcome", CELLS)
def test_each_cell_of_the_table(state: SessionState, op: SessionOp, outcome: Transition | Reason) -> None:
    if isinstance(outcome, Transition):
        assert apply(state, op, session_id="s-1") == outcome
        return
    with pytest.raises(FleetError) as raised:
        apply(state, op, session_id="s-1")
    error = raised.value
    assert error.reason is outcome
    assert error.resource == ("fleet.v1.Session", "sessions/s-1")
    assert error.metadata == {"sessionId": "s-1"}
    assert "s-1" in error.message


def test_the_table_has_a_cell_for_everything_that_can_happen_in_every_state() -> None:
    everything = {(state, op) for state in S for op in O}
    assert set(TABLE) == everything
    assert {(state, op) for state, op, _ in CELLS} == everything


def test_a_bound_session_that_outgrew_its_node_leaves_it_and_owes_it_a_revoke() -> None:
    assert apply(S.BOUND, O.APPEND, session_id="s", fits=False) == unbound_owing
    assert apply(S.UNBOUND, O.APPEND, session_id="s", fits=False) == stays[S.UNBOUND]


def test_a_generation_that_ended_without_a_node_leaves_its_session_unbound() -> None:
    assert apply(S.GENERATING, O.GENERATION_ENDED, session_id="s", keeps_node=False) == stays[S.UNBOUND]


@pytest.mark.parametrize(
    "state, op, advice",
    [
        (S.GENERATING, O.APPEND, "wait for its finish or cancel it"),
        (S.PARKED, O.GENERATE, "resume it first"),
        (S.BOUND, O.RESUME, "use it as it is"),
    ],
)
def test_a_refusal_says_what_to_do(state: SessionState, op: SessionOp, advice: str) -> None:
    with pytest.raises(FleetError, match=advice):
        apply(state, op, session_id="s")


def attempt(state: SessionState, op: SessionOp, *, fits: bool, keeps_node: bool) -> Transition | Reason:
    try:
        return apply(state, op, session_id="s", fits=fits, keeps_node=keeps_node)
    except FleetError as error:
        return error.reason


refusable = {
    S.UNBOUND: {not_parked, fault},
    S.BOUND: {not_parked, fault},
    S.GENERATING: {in_progress, not_parked},
    S.PARKED: {parked, fault},
}


@given(st.lists(st.tuples(st.sampled_from(O), st.booleans(), st.booleans()), max_size=60))
def test_whatever_happens_a_session_that_leaves_its_node_owes_it_a_revoke_and_no_other_does(
    steps: list[tuple[SessionOp, bool, bool]],
) -> None:
    state = S.UNBOUND
    for op, fits, keeps_node in steps:
        outcome = attempt(state, op, fits=fits, keeps_node=keeps_node)
        if isinstance(outcome, Reason):
            assert outcome in refusable[state]
            continue
        had_a_node = state in (S.BOUND, S.GENERATING)
        has_a_node = outcome.to in (S.BOUND, S.GENERATING)
        # The last attempt of a generation that ends without a node left it, and owed the revoke, before.
        left_before = op is O.GENERATION_ENDED and not keeps_node
        assert outcome.owes_revoke == (had_a_node and not has_a_node and not left_before)
        if outcome.to is None:
            assert op in (O.FINISH, O.EXPIRED)
            return
        assert op is not O.FINISH
        state = outcome.to
