"""What the head means reaches the node's messages, and the other way round."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.v1 import admin_service_pb2, types_pb2
from fleet.v1 import node_service_pb2 as pb
from fleet_service.domain.commands import CancelRun, Phase, Refusal, RefusalCode, Revoke, RunFinish
from fleet_service.domain.node_types import Feature, ModelInfo, NodeHello, Report
from fleet_service.domain.specs import Qos
from fleet_service.links import convert
from tests.links.scripted_node import EPOCH, INTRODUCTION, a_run, an_append, an_assign


def test_an_assign_says_whose_session_it_is_and_sets_every_sampling_field() -> None:
    message = convert.assign_request(an_assign(engine_options=b"x", lease_s=0.0001), INTRODUCTION)
    assert (message.session_id, message.epoch, message.command_id) == ("s-1", EPOCH, 1)
    assert (message.fleet_id, message.head_id) == ("fleet", "head-1")
    assert (message.model, message.model_revision) == ("m", "r1")
    assert message.sampling.temperature == 0.5
    assert message.sampling.top_p == 0.25
    assert message.sampling.HasField("min_p")
    assert message.sampling.min_p == 0.0
    assert message.sampling.top_k == 3
    assert message.sampling.seed == 2**64 - 1
    assert message.qos_class == types_pb2.QOS_CLASS_AGENT
    assert message.engine_options == b"x"
    assert message.lease_ms == 1, "a short lease is not none"


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("I", ids)], ids=["list", "tuple", "array"])
def test_an_append_carries_its_tokens_from_any_sequence(
    kind: Callable[[list[int]], Sequence[int]],
) -> None:
    message = convert.append_request(an_append(kind([1, 2**32 - 1, 0]), base_length=9))
    assert list(message.token_ids) == [1, 2**32 - 1, 0]
    assert (message.session_id, message.epoch, message.command_id, message.base_length) == (
        "s-1",
        EPOCH,
        2,
        9,
    )


def test_a_generate_names_its_context_and_what_is_left_of_its_budget() -> None:
    run = a_run(
        context_crc32=0xDEADBEEF,
        prefix_token_ids=[4, 5],
        first_index=2,
        max_wall_s=1.5,
        assign=an_assign(),
        append=an_append([7]),
    )
    message = convert.generate_request(run, INTRODUCTION)
    assert (message.session_id, message.epoch, message.command_id) == ("s-1", EPOCH, 3)
    assert message.generation_id == "g-1"
    assert (message.context_length, message.context_crc32) == (3, 0xDEADBEEF)
    assert list(message.prefix_token_ids) == [4, 5]
    assert (message.first_index, message.max_new_tokens, message.max_wall_ms) == (2, 10, 1500)
    assert message.qos_class == types_pb2.QOS_CLASS_INTERACTIVE
    assert message.assign == convert.assign_request(an_assign(), INTRODUCTION)
    assert message.append == convert.append_request(an_append([7]))


def test_a_generate_without_inline_binding_has_neither_assign_nor_append() -> None:
    message = convert.generate_request(a_run(), INTRODUCTION)
    assert not message.HasField("assign")
    assert not message.HasField("append")


def test_cancel_and_revoke_name_session_and_epoch() -> None:
    assert convert.cancel_request(CancelRun("s", 5, "g")) == pb.CancelRequest(
        session_id="s", epoch=5, generation_id="g"
    )
    assert convert.revoke_request(Revoke("s", 5)) == pb.RevokeRequest(session_id="s", epoch=5)


def test_head_introduces_itself_in_handshake_reports_and_leases() -> None:
    handshake = convert.handshake_request(INTRODUCTION)
    assert (handshake.min_version, handshake.max_version) == (1, 1)
    assert (handshake.fleet_id, handshake.head_id, handshake.term) == ("fleet", "head-1", 7)
    watch = convert.watch_request(INTRODUCTION, 2.0)
    assert (watch.fleet_id, watch.head_id, watch.term, watch.period_ms) == ("fleet", "head-1", 7, 2000)
    renew = convert.renew_request(INTRODUCTION, 60.0, INTRODUCTION.term)
    assert (renew.fleet_id, renew.head_id, renew.term, renew.lease_ms) == ("fleet", "head-1", 7, 60_000)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_durations_always_fit_the_wire(duration_s: float) -> None:
    assert 0 <= convert.milliseconds(duration_s) <= 2**32 - 1


@pytest.mark.parametrize("name", pb.RefusalCode.keys()[1:])
def test_every_refusal_of_the_contract_is_known(name: str) -> None:
    code = RefusalCode(name.removeprefix("REFUSAL_CODE_"))
    message = pb.Refusal(
        code=name,
        current_epoch=1,
        context_length=2,
        max_context_tokens=3,
        retry_after_ms=1500,
        detail="why",
    )
    assert convert.refusal(message) == Refusal(code, 1, 2, 3, 1.5, "why")


@pytest.mark.parametrize("code", [0, 99])
def test_a_refusal_of_unknown_code_is_still_a_refusal(code: int) -> None:
    message = pb.Refusal.FromString(bytes([0x08, code]))
    assert convert.refusal(message).code is RefusalCode.UNRECOGNISED


def test_every_class_phase_finish_and_feature_has_its_counterpart() -> None:
    assert set(convert.QOS_TO_PROTO) == set(Qos)
    assert all(int(qos) == wire for qos, wire in convert.QOS_TO_PROTO.items())
    assert {pb.GenerationPhase.Name(k): v for k, v in convert.PHASES.items()} == {
        f"GENERATION_PHASE_{phase.name}": phase for phase in Phase
    }
    assert {types_pb2.FinishReason.Name(k): v for k, v in convert.RUN_FINISHES.items()} == {
        f"FINISH_REASON_{finish.name}": finish for finish in RunFinish
    }
    assert {admin_service_pb2.NodeFeature.Name(k): v for k, v in convert.FEATURES.items()} == {
        f"NODE_FEATURE_{feature.name}": feature for feature in Feature
    }


def test_a_report_keeps_every_figure() -> None:
    names = [each.name for each in types_pb2.CapacityReport.DESCRIPTOR.fields]
    figures = {name: value for value, name in enumerate(names, start=1)}
    assert convert.report(types_pb2.CapacityReport(**figures)) == Report(**figures)


def test_a_hello_is_read_in_full_and_unknown_features_are_left_out() -> None:
    message = pb.HandshakeResponse(
        version=1,
        identity="node-a",
        incarnation="run-1",
        labels={"zone": "a"},
        report=types_pb2.CapacityReport(max_lanes=8),
        models=[types_pb2.Model(name="m", revision="r", vocab_size=9, eos_token_ids=[1, 2])],
        max_message_bytes=1024,
        highest_epoch=5,
    )
    message.features.extend([admin_service_pb2.NODE_FEATURE_INLINE_BIND, 77])  # type: ignore[list-item]
    assert convert.hello(message) == NodeHello(
        identity="node-a",
        incarnation="run-1",
        version=1,
        labels={"zone": "a"},
        report=Report(max_lanes=8),
        models=(ModelInfo("m", "r", 9, frozenset({1, 2}), 0),),
        features=frozenset({Feature.INLINE_BIND}),
        max_message_bytes=1024,
        highest_epoch=5,
    )


def test_a_node_that_names_no_message_limit_has_16_mib() -> None:
    assert convert.hello(pb.HandshakeResponse()).max_message_bytes == 16 * 1024 * 1024
