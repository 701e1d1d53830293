"""Log lines on one stream: JSON for machines, lines for people. Never a line per token.

Loggers are `structlog.get_logger(...)` anywhere; what libraries log through the standard `logging` comes out
of the same stream in the same form.
"""

from __future__ import annotations

import logging
from typing import Literal, TextIO

import structlog


def configure_logging(stream: TextIO, level: str = "info", form: Literal["json", "console"] = "json") -> None:
    """Send lines of `level` ("debug", "info", "warning" or "error") and above to `stream`.

    Once per process, by its command; there is one log. Libraries are heard from warning on. ValueError for
    another level.
    """
    threshold = logging.getLevelNamesMapping().get(level.upper())
    if threshold is None:
        raise ValueError(f'log level "{level}": must be debug, info, warning or error')
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
        if form == "json"
        # Not with the values of variables: token ids and secrets may be among them.
        else [
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    _route_libraries(stream, max(threshold, logging.WARNING), shared, renderer)


def _route_libraries(
    stream: TextIO,
    threshold: int,
    shared: list[structlog.typing.Processor],
    renderer: list[structlog.typing.Processor],
) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(threshold)
