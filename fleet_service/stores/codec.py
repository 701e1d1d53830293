"""Values to text and bytes and back, as they stand in a store's rows."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from fleet_service.domain.events import Finished, Moved, Started
from fleet_service.domain.specs import GenerationSpec, Sampling, SessionSpec
from fleet_service.runtime.records import GenerationStarted
from fleet_service.runtime.views import SessionView


@dataclass(frozen=True, slots=True)
class _Body:
    """What of a generation is only read as a whole."""

    spec: GenerationSpec
    sampling: Sampling
    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    context_tokens: int
    branch: int


_SPEC = TypeAdapter(SessionSpec)
_SAMPLING = TypeAdapter(Sampling)
_BODY = TypeAdapter(_Body)
_FINISHED = TypeAdapter(Finished)
_STARTED = TypeAdapter(Started)
_MOVED = TypeAdapter(Moved)
_VIEW = TypeAdapter(SessionView)
_MOVED_TAG, _STARTED_TAG = "m", "s"
_ID_TAG, _VIEW_TAG = "i", "v"


def session_spec_to(spec: SessionSpec) -> tuple[str, bytes]:
    """The spec as JSON, and its engine options, which may be any bytes."""
    return _SPEC.dump_json(replace(spec, engine_options=b"")).decode(), spec.engine_options


def session_spec_from(text: str, engine_options: bytes) -> SessionSpec:
    return replace(_SPEC.validate_json(text), engine_options=engine_options)


def sampling_to(sampling: Sampling) -> str:
    return _SAMPLING.dump_json(sampling).decode()


def sampling_from(text: str) -> Sampling:
    return _SAMPLING.validate_json(text)


def generation_to(started: GenerationStarted) -> str:
    body = _Body(
        started.spec,
        started.sampling,
        started.max_new_tokens,
        started.eos_token_ids,
        started.context_tokens,
        started.branch,
    )
    return _BODY.dump_json(body).decode()


def generation_from(
    generation_id: str, session_id: str, owner: str, text: str, accepted_at: float, deadline_at: float
) -> GenerationStarted:
    body = _BODY.validate_json(text)
    return GenerationStarted(
        generation_id=generation_id,
        session_id=session_id,
        owner=owner,
        spec=body.spec,
        sampling=body.sampling,
        max_new_tokens=body.max_new_tokens,
        eos_token_ids=body.eos_token_ids,
        context_tokens=body.context_tokens,
        accepted_at=accepted_at,
        deadline_at=deadline_at,
        branch=body.branch,
    )


def finished_to(finished: Finished) -> str:
    return _FINISHED.dump_json(finished).decode()


def finished_from(text: str) -> Finished:
    return _FINISHED.validate_json(text)


def mark_to(event: Started | Moved) -> str:
    if isinstance(event, Moved):
        return _MOVED_TAG + _MOVED.dump_json(event).decode()
    return _STARTED_TAG + _STARTED.dump_json(event).decode()


def mark_from(text: str) -> Started | Moved:
    adapter: TypeAdapter[Started] | TypeAdapter[Moved] = _MOVED if text[0] == _MOVED_TAG else _STARTED
    return adapter.validate_json(text[1:])


def answer_to(answer: SessionView | str) -> tuple[str, bytes]:
    """An answer as JSON, and the engine options in it, which may be any bytes."""
    if isinstance(answer, str):
        return _ID_TAG + answer, b""
    plain = replace(answer, spec=replace(answer.spec, engine_options=b""))
    return _VIEW_TAG + _VIEW.dump_json(plain).decode(), answer.spec.engine_options


def answer_from(text: str, engine_options: bytes) -> SessionView | str:
    if text[0] == _ID_TAG:
        return text[1:]
    view = _VIEW.validate_json(text[1:])
    return replace(view, spec=replace(view.spec, engine_options=engine_options))


# Token ids are little-endian words of 32 bits, whatever the machine.


def ids_to(token_ids: Sequence[int]) -> bytes:
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def ids_from(data: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def batch_to(parts: Sequence[tuple[int, int, Sequence[int]]]) -> bytes:
    """(generation's number, first index, ids) of several generations, in one row's bytes."""
    words = array("I", [len(parts)])
    for number, first_index, token_ids in parts:
        # Numbers of generations are of 64 bits.
        words.extend((number & 0xFFFF_FFFF, number >> 32, first_index, len(token_ids)))
    for _, _, token_ids in parts:
        words.extend(token_ids)
    return ids_to(words)


def batch_from(data: bytes) -> Iterator[tuple[int, int, array[int]]]:
    """What batch_to was given."""
    words = ids_from(data)
    count = words[0]
    at = 1 + 4 * count
    for i in range(1, at, 4):
        low, high, first_index, length = words[i : i + 4]
        yield high << 32 | low, first_index, words[at : at + length]
        at += length
