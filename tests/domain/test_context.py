from __future__ import annotations

import struct
import zlib
from array import array
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.domain.context import Context, crc32_of

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def packed_crc32(ids: list[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(ids)}I", *ids))


def test_the_checksum_is_that_of_the_packed_little_endian_ids() -> None:
    context = Context([1, 2, 3])
    assert context.crc32 == zlib.crc32(b"\x01\0\0\0\x02\0\0\0\x03\0\0\0")
    assert Context().crc32 == 0


@pytest.mark.parametrize("byteorder, layout", [("little", "<3I"), ("big", ">3I")])
def test_the_checksum_does_not_depend_on_how_the_host_holds_its_words(
    byteorder: Literal["little", "big"], layout: str
) -> None:
    ids = [1, 2**31 + 5, 77]
    as_held_there = array("I", struct.pack(layout, *ids))
    assert crc32_of(as_held_there, byteorder=byteorder) == packed_crc32(ids)


def test_reading_a_context_gives_copies() -> None:
    context = Context([1, 2, 3])
    context.token_ids().append(9)
    context.tail(1)[0] = 9
    assert list(context.token_ids()) == [1, 2, 3]
    assert list(context.tail(1)) == [2, 3]
    assert list(context.tail(3)) == []


@pytest.mark.parametrize("bad_id", [-1, 2**32])
def test_an_id_that_is_no_token_changes_nothing(bad_id: int) -> None:
    context = Context([1])
    with pytest.raises(OverflowError):
        context.append([2, bad_id])
    assert (list(context.token_ids()), context.crc32) == ([1], packed_crc32([1]))


@pytest.mark.parametrize("length", [-1, 4])
def test_a_length_outside_the_context_is_refused(length: int) -> None:
    context = Context([1, 2, 3])
    with pytest.raises(ValueError, match="truncate"):
        context.truncate(length)
    with pytest.raises(ValueError, match="tail"):
        context.tail(length)
    assert len(context) == 3


@given(
    start=token_ids, steps=st.lists(st.one_of(token_ids, st.floats(0, 1)), max_size=12), cut=st.floats(0, 1)
)
def test_length_ids_and_checksum_agree_after_any_appends_and_truncations(
    start: list[int], steps: list[list[int] | float], cut: float
) -> None:
    context, model = Context(iter(start)), list(start)
    for step in steps:
        if isinstance(step, list):
            context.append(step)
            model += step
        else:
            keep = int(step * len(model))
            context.truncate(keep)
            del model[keep:]
        assert len(context) == len(model)
        assert context.crc32 == packed_crc32(model)
    assert list(context.token_ids()) == model
    at = int(cut * len(model))
    assert list(context.tail(at)) == model[at:]
