"""A head that answers as told, and what the edge's tests make of it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from fleet_service.domain.errors import FleetError, Reason
from fleet_service.domain.events import (
    Accepted,
    Event,
    Finished,
    FinishReason,
    Started,
    Timings,
    Tokens,
)
from fleet_service.domain.node_types import Feature, ModelInfo, NodeState, Report
from fleet_service.domain.placement import Verdict
from fleet_service.domain.session_table import SessionState
from fleet_service.domain.specs import GenerationSpec, SessionSpec
from fleet_service.runtime.views import (
    CancelOutcome,
    CancelResult,
    Explanation,
    FleetChange,
    ModelSummary,
    NameInfo,
    NodeInfo,
    ProbeResult,
    RequestKey,
    SessionView,
)
from tests.api.fake_watching import DRAIN, DRAINED, SUMMARY, FakeProgress, FakeWatcher, change

MODEL = ModelInfo("toy", "r1", 1000, frozenset({2, 1}), 4096)
TIMINGS = Timings(queued_s=0.001, first_token_s=0.25, total_s=1.5, longest_gap_s=0.3)
FINISHED = Finished(FinishReason.LENGTH, context_tokens=3, output_tokens=4, attempts=1, timings=TIMINGS)
STORY: tuple[Event, ...] = (
    Accepted("gen-1", "s1"),
    Started("node-a", 7),
    Tokens(0, [10, 11]),
    Tokens(2, [12, 13]),
    FINISHED,
)
SESSION = SessionView(
    session_id="s1",
    spec=SessionSpec("toy", node_selector={"zone": "eu"}),
    state=SessionState.BOUND,
    context_length=3,
    context_crc32=0xDEADBEEF,
    node="node-a",
    epoch=7,
    generation_id="",
    created_at=1_700_000_000.25,
    last_used_at=1_700_000_001.5,
)
NAME = NameInfo(
    entry="dns:///nodes.example:8454",
    addresses=("10.0.0.1:8454", "10.0.0.2:8454", "[2001:db8::1]:8454"),
    other_ways=("[2001:db8::1]:8454",),
    removed=("10.0.0.2:8454",),
    left_out=3,
    failure="name not found",
    resolved_at=1_700_000_002.5,
)
NODE = NodeInfo(
    name="node-a",
    address="10.0.0.1:8454",
    incarnation="run-1",
    state=NodeState.UP,
    state_detail="",
    cordoned=True,
    cordon_note="disk",
    reports_stale=False,
    labels={"zone": "eu"},
    models=(MODEL,),
    features=frozenset({Feature.INLINE_BIND}),
    report=Report(kv_blocks_used=3, kv_blocks_total=10, max_lanes=4),
    report_age_s=0.5,
    lanes=4,
    sessions=2,
    running=1,
    queued=1,
    reservations=2,
    outbox=0,
    failures={"LINK_LOST": 2},
    last_seen_at=1_700_000_002.0,
    found_by=NAME.entry,
    unlisted=True,
    cordoned_by="ops",
    cordoned_at=1_700_000_000.5,
    drain=DRAIN,
)
SNAPSHOT = FleetChange(True, [NODE], (), SUMMARY, (), 0)
VERDICT = Verdict(
    node="node-a",
    eligible=True,
    left_out="",
    eta_ms=812,
    ahead=2,
    decode_tokens_per_s=20,
    prefill_tokens_per_s=200,
    kv_used_pct=30,
    sessions=2,
    reservations=1,
    max_context_tokens=4096,
    report_age_ms=500,
    decode_reported=True,
    prefill_reported=False,
)


T = TypeVar("T")


class FakeReader:
    """Gives the batches it has, then waits for ever; remembers that it was closed."""

    def __init__(self, batches: Sequence[Sequence[Event]]) -> None:
        self._batches = [list(batch) for batch in batches]
        self.branch = 0
        self.closed = asyncio.Event()
        self.closed_times = 0

    async def read(self) -> list[Event]:
        if not self._batches:
            await asyncio.Event().wait()
        return self.next_batch()

    def next_batch(self) -> list[Event]:
        return self._batches.pop(0) if self._batches else []

    def close(self) -> None:
        self.closed_times += 1
        self.closed.set()


class EndlessReader(FakeReader):
    """Always has more, as much as is read."""

    def __init__(self) -> None:
        super().__init__([])
        self._next_index = 0

    async def read(self) -> list[Event]:
        tokens = Tokens(self._next_index, [2**31] * 4096)
        self._next_index += 4096
        return [tokens]


class BrokenReader(FakeReader):
    """Fails while it is read, as nothing should."""

    async def read(self) -> list[Event]:
        raise RuntimeError("secret of the reader")


class FakeFollower:
    """Gives a reader's batches one by one, each as news."""

    def __init__(self, reader: FakeReader, on_news: Callable[[], None]) -> None:
        self._reader = reader
        self._on_news = on_news

    @property
    def branch(self) -> int:
        return self._reader.branch

    def has_some(self, most_tokens: int) -> bool:
        return False  # it says so by itself

    def take_some(self, most_tokens: int) -> list[Event]:
        asyncio.get_running_loop().call_soon(self._on_news)
        return self._reader.next_batch()

    def close(self) -> None:
        self._reader.close()


class FakeGeneration:
    generation_id = "gen-1"
    session_id = "s1"

    def __init__(self, reader: FakeReader) -> None:
        self.reader = reader
        self.attached_at: int | None = None
        self.attached_branch: int | None = None
        self.length: int | None = None

    def attach(self, from_index: int = 0, branch: int = 0) -> FakeReader:
        self._attached(from_index, branch)
        return self.reader

    def follow(self, from_index: int, branch: int, on_news: Callable[[], None]) -> FakeFollower:
        self._attached(from_index, branch)
        return FakeFollower(self.reader, on_news)

    def _attached(self, from_index: int, branch: int) -> None:
        if self.length is not None and from_index > self.length:
            raise FleetError(
                Reason.INDEX_OUT_OF_RANGE,
                f"generation gen-1 has {self.length} tokens, not {from_index}",
                metadata={"fromIndex": str(from_index), "tokens": str(self.length)},
            )
        self.attached_at, self.attached_branch = from_index, branch


class FakeHead:
    """Raises errors[method] where it is set; otherwise gives the canned answer and keeps the arguments."""

    books_balance = True

    def __init__(self) -> None:
        self.errors: dict[str, Exception] = {}
        self.calls: dict[str, tuple[Any, ...]] = {}
        self.owners: dict[str, str] = {}
        self.generation = FakeGeneration(FakeReader([STORY[:1], STORY[1:3], STORY[3:]]))
        self.context: Sequence[int] = [5, 6, 7]
        self.cancel_result = CancelResult(CancelOutcome.HELD, None)
        self.progress = FakeProgress(DRAIN, DRAINED)
        self.watcher = FakeWatcher(SNAPSHOT, change(FINISHED))
        self.explanation = Explanation("load-aware", "node-a", None, [VERDICT])

    def _take(self, method: str, *arguments: Any, owner: str = "") -> None:
        self.calls[method] = arguments
        self.owners[method] = owner
        if method in self.errors:
            raise self.errors[method]

    async def create_session(
        self, session_id: str, spec: SessionSpec, token_ids: Sequence[int], key: RequestKey | None, owner: str
    ) -> SessionView:
        self._take("create_session", session_id, spec, token_ids, key, owner=owner)
        return SESSION

    async def told(self, read: Callable[[], T]) -> T:
        return read()

    def get_session(self, session_id: str, owner: str) -> SessionView:
        self._take("get_session", session_id, owner=owner)
        return SESSION

    async def context_of(self, session_id: str, owner: str) -> Sequence[int]:
        self._take("context_of", session_id, owner=owner)
        return self.context

    def list_sessions(
        self, page_size: int, page_token: str, state: SessionState | None, node: str, owner: str
    ) -> tuple[list[SessionView], str]:
        self._take("list_sessions", page_size, page_token, state, node, owner=owner)
        return [SESSION], "more"

    async def append_tokens(
        self,
        session_id: str,
        token_ids: Sequence[int],
        expected_length: int | None,
        truncate_to: int | None,
        key: RequestKey | None,
        owner: str,
    ) -> SessionView:
        self._take("append_tokens", session_id, token_ids, expected_length, truncate_to, key, owner=owner)
        return SESSION

    async def park_session(self, session_id: str, owner: str) -> SessionView:
        self._take("park_session", session_id, owner=owner)
        return SESSION

    async def resume_session(self, session_id: str, owner: str) -> SessionView:
        self._take("resume_session", session_id, owner=owner)
        return SESSION

    async def finish_session(self, session_id: str, owner: str) -> SessionView:
        self._take("finish_session", session_id, owner=owner)
        return SESSION

    async def generate(
        self,
        session_id: str,
        generation_id: str,
        spec: GenerationSpec,
        key: RequestKey | None,
        trace: object | None,
        owner: str,
    ) -> FakeGeneration:
        self._take("generate", session_id, generation_id, spec, key, trace, owner=owner)
        return self.generation

    async def complete(
        self,
        spec: SessionSpec,
        token_ids: Sequence[int],
        generation_spec: GenerationSpec,
        generation_id: str,
        key: RequestKey | None,
        trace: object | None,
        owner: str,
    ) -> FakeGeneration:
        self._take("complete", spec, token_ids, generation_spec, generation_id, key, trace, owner=owner)
        return self.generation

    def find_generation(self, generation_id: str, owner: str) -> FakeGeneration:
        self._take("find_generation", generation_id, owner=owner)
        return self.generation

    async def cancel_generation(self, generation_id: str, owner: str) -> CancelResult:
        self._take("cancel_generation", generation_id, owner=owner)
        return self.cancel_result

    def list_models(self) -> list[ModelSummary]:
        self._take("list_models")
        return [ModelSummary(MODEL, 1, 2)]

    async def all_nodes(self) -> list[NodeInfo]:
        self._take("all_nodes")
        return [NODE]

    def list_names(self) -> list[NameInfo]:
        return [NAME]

    async def add_name(self, entry: str) -> NameInfo:
        self._take("add_name", entry)
        return NAME

    async def remove_name(self, entry: str) -> NameInfo:
        self._take("remove_name", entry)
        return NAME

    def get_node(self, ref: str) -> NodeInfo:
        self._take("get_node", ref)
        return NODE

    async def probe_nodes(self, refs: Sequence[str]) -> list[ProbeResult]:
        self._take("probe_nodes", refs)
        return [ProbeResult("node-a", "10.0.0.1:8454", True, "", "node-a", (MODEL,), 0.012)]

    async def add_node(self, address: str) -> NodeInfo:
        self._take("add_node", address)
        return NODE

    async def remove_node(self, ref: str) -> NodeInfo:
        self._take("remove_node", ref)
        return NODE

    async def settled(self) -> None:
        return

    def cordon_node(self, ref: str, note: str, by: str) -> NodeInfo:
        self._take("cordon_node", ref, note, by)
        return NODE

    def uncordon_node(self, ref: str) -> NodeInfo:
        self._take("uncordon_node", ref)
        return NODE

    def drain_node(self, ref: str, note: str, by: str) -> FakeProgress:
        self._take("drain_node", ref, note, by)
        return self.progress

    def watch_fleet(self, *, with_turns: bool) -> FakeWatcher:
        self._take("watch_fleet", with_turns)
        return self.watcher

    def explain_placement(self, session_id: str, spec: SessionSpec | None, prompt_tokens: int) -> Explanation:
        self._take("explain_placement", session_id, spec, prompt_tokens)
        return self.explanation


def not_found(what: str = "session", name: str = "s1") -> FleetError:
    reason = {"session": Reason.SESSION_NOT_FOUND, "node": Reason.NODE_NOT_FOUND}[what]
    key = {"session": "sessionId", "node": "node"}[what]
    return FleetError(reason, f"no {what} {name}", metadata={key: name})


class Caught:
    """An error as a client got it."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.text = error.details() or ""
        self.trailers = dict(error.trailing_metadata())
        self.status = status_pb2.Status()
        raw = self.trailers.get("grpc-status-details-bin", b"")
        assert isinstance(raw, bytes)
        self.status.ParseFromString(raw)
        self.details: dict[str, Any] = {}
        for packed in self.status.details:
            name = packed.type_url.rpartition(".")[2]
            message: Message = getattr(error_details_pb2, name)()
            assert packed.Unpack(message)
            assert name not in self.details, "one detail of each type"
            self.details[name] = message

    @property
    def reason(self) -> str:
        info: error_details_pb2.ErrorInfo = self.details["ErrorInfo"]
        assert info.domain == "fleet.v1"
        return info.reason


async def refusal_of(call: Any) -> Caught:
    """Run a call, unary or streaming, that must fail, and take its error apart."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return Caught(error)
    raise AssertionError("the call was answered")
