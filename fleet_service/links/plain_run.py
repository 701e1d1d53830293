"""One generation on a plain link: a Generate call, and the task that reads it into a sink."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog

from fleet.v1 import node_service_pb2
from fleet_service.links import convert
from fleet_service.runtime.protocols import LinkError, LinkLostError, NodeFaultError, RunSink

_log = structlog.get_logger(__name__)

GenerateCall = grpc.aio.UnaryStreamCall[
    node_service_pb2.NodeServiceGenerateRequest, node_service_pb2.NodeServiceGenerateResponse
]


class PlainRun:
    """A RunHandle. `call` is None when the link was gone before the run: then it only breaks.

    `read` is the run's one task; it alone calls the sink. `end_timeout_s` bounds the wait for the call's
    status after the finish, so that a node that never ends its call costs nothing. `explain` turns a failure
    of the call, which a cancellation from outside the task is too, into the error for the sink.
    """

    __slots__ = ("_call", "_end_timeout_s", "_explain", "_listening", "_on_sign", "_over", "_sink")

    def __init__(
        self,
        call: GenerateCall | None,
        sink: RunSink,
        *,
        on_sign: Callable[[], None],
        explain: Callable[[BaseException], LinkError],
        end_timeout_s: float,
    ) -> None:
        self._call = call
        self._sink = sink
        self._on_sign = on_sign
        self._explain = explain
        self._end_timeout_s = end_timeout_s
        self._listening = True
        self._over = False

    def close(self) -> None:
        """Stop listening, and cancel the call unless it has finished."""
        self._listening = False
        self._cancel_call()

    def _cancel_call(self) -> None:
        if self._call is not None and not self._over:
            self._call.cancel()

    async def read(self) -> None:
        """Feed the sink until the run ends, is closed or breaks. Raises CancelledError of its own task."""
        task = asyncio.current_task()
        cancels_before = 0 if task is None else task.cancelling()
        try:
            error = await self._relay()
        except (asyncio.CancelledError, grpc.aio.AioRpcError) as failure:
            if task is not None and task.cancelling() > cancels_before:
                raise
            error = self._explain(failure)
        except Exception as failure:  # noqa: BLE001 - it breaks the run, whatever it is
            _log.exception("reading a run failed")
            error = NodeFaultError(f"Generate: reading failed: {failure!r}")
        finally:
            self._cancel_call()
            self._over = True
        if error is not None and self._listening:
            self._listening = False
            self._sink.on_broken(error)

    async def _relay(self) -> LinkError | None:
        """Read message by message. None once the run has finished, was refused or closed."""
        call = self._call
        if call is None:
            return LinkLostError("Generate: the link is gone")
        read, on_sign, on_step = call.read, self._on_sign, self._sink.on_step
        phases, finishes = convert.PHASES, convert.RUN_FINISHES
        while True:
            message = await read()
            if not self._listening:
                return None
            if not isinstance(message, node_service_pb2.NodeServiceGenerateResponse):
                return _broken_stream(ended=message is grpc.aio.EOF)
            on_sign()
            finish = None
            if message.finish and (finish := finishes.get(message.finish)) is None:
                return NodeFaultError(f"Generate: unknown finish {message.finish}")
            refusal = convert.refusal(message.refusal) if message.HasField("refusal") else None
            self._over = finish is not None or refusal is not None
            on_step(
                message.epoch,
                message.first_index,
                message.token_ids,
                phases.get(message.phase),
                finish,
                refusal,
            )
            if self._over:
                self._listening = False
                await self._await_status(call)
                return None

    async def _await_status(self, call: GenerateCall) -> None:
        """Let the node end the call: a reset now would look like a cancel to it."""
        try:
            async with asyncio.timeout(self._end_timeout_s):
                if await call.read() is not grpc.aio.EOF:
                    _log.warning("a node sent more after the end of a run")
        except (grpc.aio.AioRpcError, TimeoutError) as failure:
            _log.debug("a run's call did not end well after its finish", failure=repr(failure))
        finally:
            call.cancel()


def _broken_stream(*, ended: bool) -> LinkError:
    """The error for what is no message: the end, or None, which is what gRPC makes of an undecodable one."""
    if ended:
        return NodeFaultError("Generate: the node ended the call without a finish")
    return NodeFaultError("Generate: a message could not be decoded")
