"""Values to text and bytes and back, as they stand in a store's rows.

A disk may give back other bytes than it was given, and SQLite has no checksums in the file proper: so each
text carries one in front, and each run of token ids one behind. DamagedError says that it is wrong.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from fleet_service.domain.events import Finished, Moved, Started
from fleet_service.domain.specs import GenerationSpec, Sampling, SessionSpec
from fleet_service.runtime.records import GenerationStarted, SessionKept
from fleet_service.runtime.views import SessionView


class DamagedError(ValueError):
    """These are not the bytes that were written."""


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
_SEAL_CHARS = 8
_WORD_BYTES = 4


def _sealed(text: str, *beside: str | float | bytes) -> str:
    """A text with a checksum of it, and of what stands beside it in its row."""
    check = zlib.crc32(text.encode())
    for value in beside:
        check = zlib.crc32(value if isinstance(value, bytes) else str(value).encode(), check)
    return f"{check:0{_SEAL_CHARS}x}{text}"


def _unsealed(sealed: str, *beside: str | float | bytes) -> str:
    text = sealed[_SEAL_CHARS:]
    if _sealed(text, *beside) != sealed:
        raise DamagedError("a text is not what was written")
    return text


def session_spec_to(kept: SessionKept) -> tuple[str, bytes]:
    """The spec as JSON, and its engine options, which may be any bytes."""
    options = kept.spec.engine_options
    text = _SPEC.dump_json(replace(kept.spec, engine_options=b"")).decode()
    return _sealed(text, options, kept.session_id, kept.number, kept.owner), options


def session_spec_from(
    session_id: str,
    number: int,
    owner: str,
    sealed: str,
    engine_options: bytes,
    known: dict[tuple[str, bytes], SessionSpec],
) -> SessionSpec:
    """`known` gets those that were read, by text and options: sessions of one kind share theirs."""
    text = _unsealed(sealed, engine_options, session_id, number, owner)
    spec = known.get((text, engine_options))
    if spec is None:
        spec = replace(_SPEC.validate_json(text), engine_options=engine_options)
        known[text, engine_options] = spec
    return spec


def sampling_to(sampling: Sampling) -> str:
    return _sealed(_SAMPLING.dump_json(sampling).decode())


def sampling_from(text: str) -> Sampling:
    return _SAMPLING.validate_json(_unsealed(text))


def generation_to(started: GenerationStarted) -> str:
    body = _Body(
        started.spec,
        started.sampling,
        started.max_new_tokens,
        started.eos_token_ids,
        started.context_tokens,
        started.branch,
    )
    return _sealed(_BODY.dump_json(body).decode(), *_beside(started))


def generation_from(
    generation_id: str, session_id: str, owner: str, sealed: str, accepted_at: float, deadline_at: float
) -> GenerationStarted:
    body = _BODY.validate_json(sealed[_SEAL_CHARS:])
    started = GenerationStarted(
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
    _unsealed(sealed, *_beside(started))
    return started


def _beside(started: GenerationStarted) -> tuple[str | float, ...]:
    times = (float(started.accepted_at), float(started.deadline_at))
    return started.generation_id, started.session_id, started.owner, *times


def finished_to(finished: Finished) -> str:
    return _sealed(_FINISHED.dump_json(finished).decode())


def finished_from(text: str) -> Finished:
    return _FINISHED.validate_json(_unsealed(text))


def mark_to(event: Started | Moved) -> str:
    if isinstance(event, Moved):
        return _sealed(_MOVED_TAG + _MOVED.dump_json(event).decode())
    return _sealed(_STARTED_TAG + _STARTED.dump_json(event).decode())


def mark_from(sealed: str) -> Started | Moved:
    text = _unsealed(sealed)
    adapter: TypeAdapter[Started] | TypeAdapter[Moved] = _MOVED if text[0] == _MOVED_TAG else _STARTED
    return adapter.validate_json(text[1:])


def answer_to(answer: SessionView | str) -> tuple[str, bytes]:
    """An answer as JSON, and the engine options in it, which may be any bytes."""
    if isinstance(answer, str):
        return _sealed(_ID_TAG + answer), b""
    plain = replace(answer, spec=replace(answer.spec, engine_options=b""))
    options = answer.spec.engine_options
    return _sealed(_VIEW_TAG + _VIEW.dump_json(plain).decode(), options), options


def answer_from(sealed: str, engine_options: bytes) -> SessionView | str:
    text = _unsealed(sealed, engine_options)
    if text[0] == _ID_TAG:
        return text[1:]
    view = _VIEW.validate_json(text[1:])
    return replace(view, spec=replace(view.spec, engine_options=engine_options))


# Token ids are little-endian words of 32 bits, whatever the machine.


def ids_to(token_ids: Sequence[int]) -> bytes:
    data = _swapped(array("I", token_ids)).tobytes()
    return data + zlib.crc32(data).to_bytes(_WORD_BYTES, "little")


def ids_from(data: bytes) -> array[int]:
    plain = data[:-_WORD_BYTES]
    if len(data) % _WORD_BYTES or zlib.crc32(plain).to_bytes(_WORD_BYTES, "little") != data[-_WORD_BYTES:]:
        raise DamagedError("token ids are not what was written")
    ids = array("I")
    ids.frombytes(plain)
    return _swapped(ids)


def _swapped(ids: array[int]) -> array[int]:
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


def batch_numbers(data: bytes) -> list[int]:
    """The generations of which there are tokens in it."""
    words = ids_from(data)
    end = 1 + 4 * words[0]
    return [high << 32 | low for low, high in zip(words[1:end:4], words[2:end:4], strict=True)]
