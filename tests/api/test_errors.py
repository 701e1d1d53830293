"""What goes out for an error: size, retry hints, and that nothing internal does."""

import random

import grpc
import pytest
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from fleet_service.api.errors import MAX_STATUS_BYTES, RULES, ErrorTranslator, WireError
from fleet_service.domain.errors import FieldViolation, FleetError, Reason


def sent(error: Exception) -> WireError:
    return ErrorTranslator(random.Random(1)).translate(error, "req-1")


def retry_ms(wire: WireError) -> int | None:
    for packed in wire.status.details:
        retry = error_details_pb2.RetryInfo()
        if packed.Unpack(retry):
            return retry.retry_delay.ToMilliseconds()
    return None


def pushback(wire: WireError) -> str | bytes | None:
    return dict(wire.trailers).get("grpc-retry-pushback-ms")


def test_a_hint_is_spread_and_the_same_in_detail_and_trailer() -> None:
    translator = ErrorTranslator(random.Random(1))
    error = FleetError(Reason.FLEET_SATURATED, "full", retry_after_s=2.0)
    hints = {retry_ms(wire := translator.translate(error, "r")) for _ in range(20)}
    assert pushback(wire) == str(retry_ms(wire))
    assert len(hints) > 10
    assert all(hint is not None and 2000 <= hint <= 2501 for hint in hints)


def test_a_retry_policy_is_told_to_stop_where_it_cannot_help() -> None:
    assert pushback(sent(FleetError(Reason.LIMIT_EXCEEDED, "x", metadata={"limit": "max_nodes"}))) == "-1"
    assert pushback(sent(FleetError(Reason.REQUEST_TOO_LARGE, "x"))) == "-1"


def test_codes_no_policy_retries_carry_no_pushback() -> None:
    assert pushback(sent(FleetError(Reason.SESSION_NOT_FOUND, "x"))) is None


def test_a_limit_that_frees_itself_says_when() -> None:
    wire = sent(FleetError(Reason.LIMIT_EXCEEDED, "x", retry_after_s=0.1))
    assert 100 <= (retry_ms(wire) or 0) <= 126
    assert pushback(wire) == str(retry_ms(wire))


def test_a_prompt_too_long_is_the_request_s_fault_a_grown_session_is_a_matter_of_state() -> None:
    metadata = {"model": "toy", "promptTokens": "9000", "maxContextTokens": "4096"}
    prompt = sent(FleetError(Reason.CONTEXT_TOO_LONG, "too long", metadata))
    assert prompt.code is grpc.StatusCode.INVALID_ARGUMENT
    bad_request = error_details_pb2.BadRequest()
    assert prompt.status.details[1].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "token_ids"
    grown = sent(
        FleetError(
            Reason.CONTEXT_TOO_LONG,
            "too long",
            metadata,
            resource=("fleet.v1.Model", "models/toy"),
            state_dependent=True,
        )
    )
    assert grown.code is grpc.StatusCode.OUT_OF_RANGE
    failure = error_details_pb2.PreconditionFailure()
    assert grown.status.details[1].Unpack(failure)
    assert (failure.violations[0].type, failure.violations[0].subject) == ("CONTEXT_WINDOW", "models/toy")


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason not in RULES])
def test_a_cause_of_finish_error_never_ends_a_call(reason: Reason) -> None:
    wire = sent(FleetError(reason, "secret"))
    assert (wire.code, wire.reason) == (grpc.StatusCode.INTERNAL, Reason.INTERNAL)
    assert "secret" not in str(wire)


def test_names_are_full_whether_the_head_gave_them_short_or_long() -> None:
    for error in (
        FleetError(Reason.MODEL_NOT_FOUND, "x", metadata={"model": "org/toy"}),
        FleetError(Reason.MODEL_NOT_FOUND, "x", resource=("fleet.v1.Model", "models/org/toy")),
        FleetError(Reason.MODEL_NOT_FOUND, "x", resource=("model", "org/toy")),
    ):
        info = error_details_pb2.ResourceInfo()
        assert sent(error).status.details[1].Unpack(info)
        assert (info.resource_type, info.resource_name) == ("fleet.v1/Model", "models/org/toy")


texts = st.text(st.characters(codec=None), max_size=3000)


@given(
    reason=st.sampled_from(list(Reason)),
    message=texts,
    metadata=st.dictionaries(texts, texts, max_size=60),
    violations=st.lists(st.builds(FieldViolation, texts, texts), max_size=60),
    grown=st.booleans(),
)
def test_a_status_fits_its_trailer_whatever_the_error_says(
    reason: Reason,
    message: str,
    metadata: dict[str, str],
    violations: list[FieldViolation],
    grown: bool,
) -> None:
    wire = sent(FleetError(reason, message, metadata, violations=tuple(violations), state_dependent=grown))
    assert wire.status.ByteSize() <= MAX_STATUS_BYTES
    info = error_details_pb2.ErrorInfo()
    assert wire.status.details[0].Unpack(info)
    assert info.reason == wire.reason.value


def test_the_largest_error_fits() -> None:
    wire = sent(
        FleetError(
            Reason.INVALID_FIELD,
            "🙂" * 5000,
            {f"{number:03d}" + "k" * 100: "🙂" * 1000 for number in range(100)},
            violations=tuple(FieldViolation("f" * 900, "🙂" * 1000) for _ in range(100)),
        )
    )
    assert wire.status.ByteSize() <= MAX_STATUS_BYTES
    bad_request = error_details_pb2.BadRequest()
    assert wire.status.details[1].Unpack(bad_request)
    assert bad_request.field_violations[-1].description == "92 more"
