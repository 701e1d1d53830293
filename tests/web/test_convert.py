"""The page's JSON is protobuf's own, field by field."""

from __future__ import annotations

import json

import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as fleet
from fleet.v1 import types_pb2 as types
from fleet_service.web.convert import message_json

BIG = 2**64 - 1
MESSAGES: list[Message] = [
    admin.WatchFleetResponse(),
    admin.Node(
        name="n",
        state=admin.NODE_STATE_UP,
        features=[admin.NODE_FEATURE_LINK, admin.NODE_FEATURE_RESUME],
        labels={"a": "b", "": "c"},
    ),
    admin.Node(failures={"link_lost": BIG}, models=[types.Model(name="m", eos_token_ids=[1, 2])], lanes=7),
    admin.Node(state=99, drain=admin.Drain(), report=types.CapacityReport(gpu_memory_bytes=BIG)),  # type: ignore[arg-type]
    admin.NodeVerdict(node="n", eligible=True, eta_ms=0, kv_used_pct=0),
    fleet.Moved(from_node="a", to_node="b", cause=fleet.MOVE_CAUSE_DRAIN, next_index=3, epoch=BIG),
    fleet.Finished(stop_index=0, error=fleet.ErrorCause(reason="X", metadata={"k": "v"})),
    fleet.Session(spec=fleet.SessionSpec(engine_options=b"\x00\xff", sampling=types.SamplingParams(seed=5))),
]
for _message in MESSAGES[-1:]:
    _message.create_time.FromJsonString("2026-01-02T03:04:05.678Z")  # type: ignore[attr-defined]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_the_json_is_what_protobuf_would_make_and_can_be_read_back(message: Message) -> None:
    made = message_json(message)
    assert made == MessageToDict(message, preserving_proto_field_name=True)
    assert ParseDict(json.loads(json.dumps(made)), type(message)()) == message
