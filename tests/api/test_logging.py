"""The log: one JSON object per line, what libraries say included."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog

from fleet_service.telemetry.logging import configure_logging


@pytest.fixture
def restored() -> Iterator[None]:
    """The logging of the test run, put back afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.mark.usefixtures("restored")
def test_lines_are_json_with_their_call_s_ids_and_errors_in_full() -> None:
    stream = io.StringIO()
    configure_logging(stream, "info")
    structlog.contextvars.bind_contextvars(request_id="req-1")
    log = structlog.get_logger("any.module")
    log.debug("unheard")
    log.info("heard", tokens=3)
    try:
        raise ValueError("why")
    except ValueError as error:
        log.exception("failed", exc_info=error)
    heard, failed = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (heard["event"], heard["level"], heard["tokens"], heard["request_id"]) == (
        "heard",
        "info",
        3,
        "req-1",
    )
    assert heard["timestamp"].endswith("Z")
    assert "ValueError: why" in failed["exception"]


@pytest.mark.usefixtures("restored")
def test_libraries_are_heard_from_warning_on_in_the_same_form() -> None:
    stream = io.StringIO()
    configure_logging(stream, "debug")
    logging.getLogger("some.library").info("unheard")
    logging.getLogger("some.library").warning("disk %s", "full")
    (line,) = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert (line["event"], line["level"], line["logger"]) == ("disk full", "warning", "some.library")


@pytest.mark.usefixtures("restored")
def test_lines_for_people_have_no_colours_where_nobody_sees_them() -> None:
    stream = io.StringIO()
    configure_logging(stream, form="console")
    structlog.get_logger().info("heard", tokens=3)
    assert "heard" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.usefixtures("restored")
def test_a_failure_is_told_of_without_the_values_of_variables(form: Literal["json", "console"]) -> None:
    stream = io.StringIO()
    configure_logging(stream, form=form)
    token_ids = [4_700 + 11, 4_700 + 12]
    try:
        raise ValueError(f"{len(token_ids)} tokens")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "ValueError: 2 tokens" in stream.getvalue()
    assert "4711" not in stream.getvalue()


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match='"loud"'):
        configure_logging(io.StringIO(), "loud")
