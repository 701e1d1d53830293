"""Wrong requests are refused at the door, with every fault named and nothing asked of the head."""

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as fleet
from fleet.v1 import types_pb2 as types
from fleet_service.api import validate
from fleet_service.domain.errors import FleetError, Reason
from tests.api.conftest import Edge
from tests.api.fakes import refusal_of

LIMITS = validate.Limits(max_request_tokens=8, max_engine_options_bytes=16)


def fields(check: Callable[[], None]) -> list[str]:
    """The fields that a check finds fault with."""
    try:
        check()
    except FleetError as error:
        caught = error
    else:
        return []
    assert caught.reason is Reason.INVALID_FIELD
    assert all(violation.description for violation in caught.violations)
    return [violation.field for violation in caught.violations]


def spec_faults(**values: Any) -> list[str]:
    request = fleet.CreateSessionRequest(spec=fleet.SessionSpec(**{"model": "toy"} | values))
    return fields(lambda: validate.check_create_session(request, LIMITS))


def generation_faults(**values: Any) -> list[str]:
    request = fleet.GenerateRequest(session_id="s", spec=fleet.GenerationSpec(**values))
    return fields(lambda: validate.check_generate(request))


@pytest.mark.parametrize("bad", ["a b", "ä", "a/b", "x" * 129, "a\n", "\u202e", "a\x00"])
async def test_odd_ids_are_refused_everywhere(edge: Edge, bad: str) -> None:
    spec = fleet.SessionSpec(model="toy")
    for call in (
        edge.fleet.CreateSession(fleet.CreateSessionRequest(session_id=bad, spec=spec)),
        edge.fleet.CreateSession(fleet.CreateSessionRequest(request_id=bad, spec=spec)),
        edge.fleet.GetSession(fleet.GetSessionRequest(session_id=bad)),
        edge.fleet.AppendTokens(fleet.AppendTokensRequest(session_id=bad, token_ids=[1])),
        edge.fleet.Generate(fleet.GenerateRequest(session_id="s", generation_id=bad)),
        edge.fleet.GenerateAll(fleet.GenerateAllRequest(session_id=bad)),
        edge.fleet.Complete(fleet.CompleteRequest(session=spec, generation_id=bad)),
        edge.fleet.AttachGeneration(fleet.AttachGenerationRequest(generation_id=bad)),
        edge.fleet.CancelGeneration(fleet.CancelGenerationRequest(generation_id=bad)),
        edge.fleet.ParkSession(fleet.ParkSessionRequest(session_id=bad)),
        edge.fleet.ResumeSession(fleet.ResumeSessionRequest(session_id=bad)),
        edge.fleet.FinishSession(fleet.FinishSessionRequest(session_id=bad)),
        edge.admin.ExplainPlacement(admin.ExplainPlacementRequest(session_id=bad)),
    ):
        caught = await refusal_of(call)
        assert (caught.code, caught.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert not edge.head.calls


async def test_every_fault_of_a_request_is_told_at_once(edge: Edge) -> None:
    request = fleet.CompleteRequest(
        session=fleet.SessionSpec(sampling=types.SamplingParams(top_p=1.5)),
        spec=fleet.GenerationSpec(max_wall_ms=0, stop=[types.TokenSequence()]),
        generation_id="gen-mine",
        request_id="?",
    )
    caught = await refusal_of(edge.fleet.Complete(request))
    named = [violation.field for violation in caught.details["BadRequest"].field_violations]
    assert named == [
        "session.model",
        "session.sampling.top_p",
        "spec.max_wall_ms",
        "spec.stop[0].token_ids",
        "generation_id",
        "request_id",
    ]
    assert caught.details["ErrorInfo"].metadata["field"] == "session.model"


async def test_required_ids_and_names_are_required(edge: Edge) -> None:
    for call, field in (
        (edge.fleet.GetSession(fleet.GetSessionRequest()), "session_id"),
        (edge.fleet.ParkSession(fleet.ParkSessionRequest()), "session_id"),
        (edge.fleet.ResumeSession(fleet.ResumeSessionRequest()), "session_id"),
        (edge.fleet.FinishSession(fleet.FinishSessionRequest()), "session_id"),
        (edge.fleet.AppendTokens(fleet.AppendTokensRequest(token_ids=[1])), "session_id"),
        (edge.fleet.Generate(fleet.GenerateRequest()), "session_id"),
        (edge.fleet.GenerateAll(fleet.GenerateAllRequest()), "session_id"),
        (edge.fleet.AttachGeneration(fleet.AttachGenerationRequest()), "generation_id"),
        (edge.fleet.CancelGeneration(fleet.CancelGenerationRequest()), "generation_id"),
        (edge.fleet.CreateSession(fleet.CreateSessionRequest()), "spec.model"),
        (edge.fleet.Complete(fleet.CompleteRequest()), "session.model"),
        (edge.admin.GetNode(admin.GetNodeRequest()), "node"),
        (edge.admin.RemoveNode(admin.RemoveNodeRequest()), "node"),
        (edge.admin.CordonNode(admin.CordonNodeRequest()), "node"),
        (edge.admin.UncordonNode(admin.UncordonNodeRequest()), "node"),
        (edge.admin.AddNode(admin.AddNodeRequest()), "address"),
        (edge.admin.ProbeNodes(admin.ProbeNodesRequest(nodes=[""])), "nodes[0]"),
        (edge.admin.ExplainPlacement(admin.ExplainPlacementRequest()), "spec.model"),
    ):
        caught = await refusal_of(call)
        assert [v.field for v in caught.details["BadRequest"].field_violations] == [field]
    assert not edge.head.calls


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("temperature", [0.0, 100.0], [-0.1, 100.5, math.nan, math.inf, -math.inf]),
        ("top_p", [0.0, 1.0], [-0.1, 1.1, math.nan, math.inf]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1, math.nan, math.inf]),
    ],
)
def test_sampling_stays_in_its_ranges(name: str, good: list[float], bad: list[float]) -> None:
    def sampling(value: float) -> types.SamplingParams:
        params = types.SamplingParams()
        setattr(params, name, value)
        return params

    for value in good:
        params = sampling(value)
        assert spec_faults(sampling=params) == generation_faults(sampling=params) == []
    for value in bad:
        params = sampling(value)
        assert spec_faults(sampling=params) == [f"spec.sampling.{name}"]
        assert generation_faults(sampling=params) == [f"spec.sampling.{name}"]


def test_enum_values_of_later_contracts_are_refused_not_ignored() -> None:
    assert spec_faults(qos_class=99) == ["spec.qos_class"]
    assert spec_faults(replay=3) == ["spec.replay"]
    assert generation_faults(qos_class=-1) == ["spec.qos_class"]
    assert generation_faults(on_disconnect=7) == ["spec.on_disconnect"]
    listing = fleet.ListSessionsRequest(state=42)  # type: ignore[arg-type]
    assert fields(lambda: validate.check_list_sessions(listing)) == ["state"]


def test_stop_sequences_are_bounded_in_number_and_length() -> None:
    def stop(*lengths: int) -> list[types.TokenSequence]:
        return [types.TokenSequence(token_ids=[1] * length) for length in lengths]

    assert generation_faults(stop=stop(*[64] * 16)) == []
    assert generation_faults(stop=stop(*[1] * 17)) == ["spec.stop"]
    assert generation_faults(stop=stop(1, 0, 65)) == ["spec.stop[1].token_ids", "spec.stop[2].token_ids"]


def test_selectors_are_bounded() -> None:
    assert spec_faults(node_selector={f"k{n}": "v" * 128 for n in range(16)}) == []
    assert spec_faults(node_selector={f"k{n}": "v" for n in range(17)}) == ["spec.node_selector"]
    assert spec_faults(node_selector={"": "v"}) == ["spec.node_selector"]
    assert spec_faults(node_selector={"k" * 129: "v"}) == ["spec.node_selector"]
    assert spec_faults(node_selector={"k": "v" * 129}) == ["spec.node_selector"]


def test_names_and_options_are_bounded() -> None:
    assert spec_faults(model="meta/llama-3.1:8b") == []
    assert spec_faults(model="m" * 257) == ["spec.model"]
    assert spec_faults(model="two words") == ["spec.model"]
    assert spec_faults(model_revision="r\n") == ["spec.model_revision"]
    assert spec_faults(engine_options=b"x" * 16) == []
    assert spec_faults(engine_options=b"x" * 17) == ["spec.engine_options"]


def test_a_request_holds_so_many_tokens_and_no_more() -> None:
    spec = fleet.SessionSpec(model="toy")
    for count, expected in ((8, []), (9, ["token_ids"])):
        create = fleet.CreateSessionRequest(spec=spec, token_ids=[1] * count)
        append = fleet.AppendTokensRequest(session_id="s", token_ids=[1] * count)
        complete = fleet.CompleteRequest(session=spec, token_ids=[1] * count)
        assert fields(lambda: validate.check_create_session(create, LIMITS)) == expected  # noqa: B023
        assert fields(lambda: validate.check_append_tokens(append, LIMITS)) == expected  # noqa: B023
        assert fields(lambda: validate.check_complete(complete, LIMITS)) == expected  # noqa: B023


def test_an_append_must_change_something() -> None:
    empty = fleet.AppendTokensRequest(session_id="s")
    assert fields(lambda: validate.check_append_tokens(empty, LIMITS)) == ["token_ids"]
    cut = fleet.AppendTokensRequest(session_id="s", truncate_to=0)
    assert fields(lambda: validate.check_append_tokens(cut, LIMITS)) == []


def test_generation_ids_of_the_head_may_be_named_but_not_chosen() -> None:
    chosen = fleet.GenerateRequest(session_id="s", generation_id="gen-1")
    assert fields(lambda: validate.check_generate(chosen)) == ["generation_id"]
    named = fleet.CancelGenerationRequest(generation_id="gen-1")
    assert fields(lambda: validate.check_generation_request(named)) == []


def test_wall_of_zero_is_refused_absent_is_the_default() -> None:
    assert generation_faults(max_wall_ms=0) == ["spec.max_wall_ms"]
    assert generation_faults() == []


def test_pages_are_bounded() -> None:
    def page(**values: Any) -> list[str]:
        return fields(lambda: validate.check_list_sessions(fleet.ListSessionsRequest(**values)))

    assert page(page_size=1000) == []
    assert page(page_size=1001) == ["page_size"]
    assert page(page_token="x" * 513) == ["page_token"]
    assert page(node="two words") == ["node"]


@pytest.mark.parametrize(
    "address, good",
    [
        ("10.0.0.1:8454", True),
        ("node-1.internal:1", True),
        ("[2001:db8::7]:65535", True),
        ("10.0.0.1", False),
        ("10.0.0.1:0", False),
        ("10.0.0.1:65536", False),
        (":8454", False),
        ("2001:db8::7:8454", False),
        ("http://10.0.0.1:8454", False),
        ("unix:/tmp/socket", False),
        ("dns:///nodes.example:8454", True),
        ("dns:///nodes.example", True),
        ("dns:nodes.example", False),
        ("dns://10.0.0.53/nodes.example", False),
        ("dns:///10.0.0.1:8454", False),
    ],
)
def test_a_node_s_address_is_host_and_port_or_a_name(address: str, good: bool) -> None:
    request = admin.AddNodeRequest(address=address)
    assert fields(lambda: validate.check_add_node(request)) == ([] if good else ["address"])


def test_operators_requests_are_bounded() -> None:
    note = admin.CordonNodeRequest(node="n", note="x" * 513)
    assert fields(lambda: validate.check_node_request(note)) == ["note"]
    name = admin.RemoveNodeRequest(node="dns://10.0.0.53/nodes.example")
    assert fields(lambda: validate.check_node_request(name)) == ["node"]
    many = admin.ProbeNodesRequest(nodes=["n"] * 1025)
    assert fields(lambda: validate.check_probe_nodes(many)) == ["nodes"]
    both = admin.ExplainPlacementRequest(session_id="s", spec=fleet.SessionSpec(model="toy"))
    assert fields(lambda: validate.check_explain_placement(both, LIMITS)) == ["spec"]
