"""JSON for the page: the contract's own messages, and what AdminService has no message for."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fleet_service.api.convert_admin import verdict_message
from fleet_service.api.convert_sessions import finished_message, moved_message, session_message
from fleet_service.api.convert_shared import timestamp
from fleet_service.domain.events import Finished, Moved
from fleet_service.runtime.views import SessionView
from fleet_service.web.stories import Chosen, Failed, FirstToken, Left, Story, Tried, Waited, What

Json = dict[str, Any]


def message_json(message: Message) -> Json:
    """As protobuf's JSON has it, with the contract's field names; fields at their default are left out.

    For this contract's kinds of fields; protobuf's own conversion takes several times as long, which counts
    where a page watches a thousand nodes.
    """
    return {field.name: _value_of(field)(value) for field, value in message.ListFields()}


@cache
def _value_of(field: FieldDescriptor) -> Callable[[Any], Any]:
    """What turns the field's value into JSON."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        one = _one_of(field.message_type.fields_by_name["value"])
        return lambda values: {str(key): one(value) for key, value in values.items()}
    one = _one_of(field)
    if field.is_repeated:
        return lambda values: [one(value) for value in values]
    return one


def _one_of(field: FieldDescriptor) -> Callable[[Any], Any]:
    if field.enum_type is not None:
        names: Mapping[int, str] = {
            number: value.name for number, value in field.enum_type.values_by_number.items()
        }
        return lambda number: names.get(number, number)
    if field.message_type is not None:
        is_time = field.message_type is Timestamp.DESCRIPTOR
        return Timestamp.ToJsonString if is_time else message_json
    if field.type == FieldDescriptor.TYPE_BYTES:
        return lambda data: b64encode(data).decode("ascii")
    # JavaScript's numbers do not hold 64 bits.
    return str if field.cpp_type in _LONG else _same


_LONG = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def _same(value: Any) -> Any:
    return value


def session_json(view: SessionView) -> Json:
    """fleet.v1.Session, and whose it is."""
    return {**message_json(session_message(view)), "owner": view.owner}


def story_json(story: Story) -> Json:
    """One generation. Times are milliseconds since 1970."""
    info = story.info
    return {
        "generation_id": info.generation_id,
        "session_id": info.session_id,
        "owner": info.owner,
        "model": info.model,
        "qos": info.qos.name,
        "context_tokens": info.context_tokens,
        "max_new_tokens": info.max_new_tokens,
        "accepted_ms": unix_ms(story.accepted_at),
        "left_out": story.left_out,
        "turns": [{"at_ms": unix_ms(at), **_what_json(what)} for at, what in story.told()],
    }


def event_json(at: float, story: Story, what: Chosen | Moved | Finished) -> Json:
    """fleet.v1.FleetEvent."""
    told = _what_json(what)
    if isinstance(what, Chosen):
        told = {"placed": {"node": what.node}}
    elif isinstance(what, Finished):
        tried = [each.node for _at, each in story.told() if isinstance(each, Tried)]
        told = {"ended": {"node": tried[-1] if tried else "", **told}}
    info = story.info
    return {
        "time": timestamp(at).ToJsonString(),
        "generation_id": info.generation_id,
        "session_id": info.session_id,
        "model": info.model,
        **told,
    }


def unix_ms(unix_s: float) -> int:
    return round(unix_s * 1000.0)


def _what_json(what: What) -> Json:
    match what:
        case Chosen(node, verdicts):
            return {
                "placed": {"node": node, "verdicts": [message_json(verdict_message(v)) for v in verdicts]}
            }
        case Waited(seconds):
            return {"waited": {"ms": round(seconds * 1000.0)}}
        case Tried(node, number, next_index):
            return {"tried": {"node": node, "number": number, "next_index": next_index}}
        case FirstToken():
            return {"first_token": {}}
        case Left(node, number, tokens, failure):
            return {"left": {"node": node, "number": number, "tokens": tokens, "failure": failure or ""}}
        case Failed(kind):
            return {"failed": {"kind": kind.value}}
        case Moved():
            return {"moved": message_json(moved_message(what))}
        case Finished():
            return {"finished": message_json(finished_message(what))}
