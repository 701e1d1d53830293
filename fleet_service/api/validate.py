"""What is checked at the door, before the head sees a request: sizes, ids, numbers, enum values.

One function per request type. Each looks at the whole request and raises one INVALID_FIELD with every
violation found, or returns; whether a session, a model or an index exists is the head's to say.
Token ids need no loop: the wire type holds them below 2^32, and their count is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import fleet_service_pb2 as fleet
from fleet.v1 import types_pb2 as types
from fleet_service.addresses import is_name, split_name
from fleet_service.api.errors import invalid_fields
from fleet_service.domain.errors import FieldViolation

MAX_ID_LENGTH = 128
MAX_NAME_LENGTH = 256
MAX_LABEL_LENGTH = 128
MAX_SELECTOR_LABELS = 16
MAX_STOP_SEQUENCES = 16
MAX_STOP_TOKENS = 64
MAX_PAGE_SIZE = 1000
MAX_PAGE_TOKEN_LENGTH = 512
MAX_NOTE_LENGTH = 512
MAX_BY_LENGTH = 128
MAX_PROBED_NODES = 1024
MAX_TEMPERATURE = 100.0
HEAD_ID_PREFIX = "gen-"
"""Generation ids that begin so are the head's own; a caller may name one, not choose one."""

_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_ID_LENGTH}}}")
_ID_RULE = f"must be 1 to {MAX_ID_LENGTH} characters of A-Z a-z 0-9 . _ : -"
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f]")
_HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")

_QOS_CLASSES = frozenset(types.QosClass.values())
_REPLAY_MODES = frozenset(types.ReplayMode.values())
_ON_DISCONNECT = frozenset(fleet.OnDisconnect.values())
_SESSION_STATES = frozenset(fleet.SessionState.values())


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes the operator may set."""

    max_request_tokens: int = 1_048_576
    max_engine_options_bytes: int = 64 * 1024


class _Problems:
    """Gathers violations; `done` raises them all at once."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def add(self, field: str, rule: str) -> None:
        self._found.append(FieldViolation(field, rule))

    def done(self) -> None:
        """Raise INVALID_FIELD if anything was found."""
        if self._found:
            raise invalid_fields(self._found)

    def need_id(self, field: str, value: str) -> None:
        """A required id."""
        if not value:
            self.add(field, "is required")
        else:
            self.optional_id(field, value)

    def optional_id(self, field: str, value: str) -> None:
        if value and not _ID.fullmatch(value):
            self.add(field, _ID_RULE)

    def chosen_generation_id(self, value: str) -> None:
        """An id that the caller chooses for a generation to come."""
        self.optional_id("generation_id", value)
        if value.startswith(HEAD_ID_PREFIX):
            self.add("generation_id", f'must not begin with "{HEAD_ID_PREFIX}": such ids are the head\'s own')

    def optional_name(self, field: str, value: str) -> None:
        """A name given by others (model, node, address): short, without blanks and control characters."""
        if len(value) > MAX_NAME_LENGTH:
            self.add(field, f"must be at most {MAX_NAME_LENGTH} characters")
        elif _UNPRINTABLE.search(value):
            self.add(field, "must not contain blanks or control characters")

    def need_name(self, field: str, value: str) -> None:
        if not value:
            self.add(field, "is required")
        else:
            self.optional_name(field, value)

    def name_entry(self, field: str, value: str) -> None:
        """dns:///name, with or without its port."""
        try:
            split_name(value)
        except ValueError as error:
            self.add(field, str(error))

    def known(self, field: str, value: int, values: Collection[int]) -> None:
        """An enum value of the contract."""
        if value not in values:
            self.add(field, f"{value} is no value of this field in this version of the contract")

    def between(self, field: str, value: float, low: float, high: float) -> None:
        if not math.isfinite(value) or not low <= value <= high:
            self.add(field, f"must be a number from {low:g} to {high:g}")

    def token_count(self, field: str, count: int, limits: Limits) -> None:
        if count > limits.max_request_tokens:
            self.add(field, f"holds {count} tokens; a request may hold {limits.max_request_tokens}")

    def sampling(self, field: str, params: types.SamplingParams) -> None:
        if params.HasField("temperature"):
            self.between(f"{field}.temperature", params.temperature, 0.0, MAX_TEMPERATURE)
        if params.HasField("top_p"):
            self.between(f"{field}.top_p", params.top_p, 0.0, 1.0)
        if params.HasField("min_p"):
            self.between(f"{field}.min_p", params.min_p, 0.0, 1.0)

    def session_spec(self, field: str, spec: fleet.SessionSpec, limits: Limits) -> None:
        self.need_name(f"{field}.model", spec.model)
        self.optional_name(f"{field}.model_revision", spec.model_revision)
        if spec.HasField("sampling"):
            self.sampling(f"{field}.sampling", spec.sampling)
        self.known(f"{field}.qos_class", spec.qos_class, _QOS_CLASSES)
        self.known(f"{field}.replay", spec.replay, _REPLAY_MODES)
        if spec.node_selector:
            self._selector(f"{field}.node_selector", spec)
        if len(spec.engine_options) > limits.max_engine_options_bytes:
            self.add(f"{field}.engine_options", f"must be at most {limits.max_engine_options_bytes} bytes")

    def _selector(self, field: str, spec: fleet.SessionSpec) -> None:
        if len(spec.node_selector) > MAX_SELECTOR_LABELS:
            self.add(field, f"must hold at most {MAX_SELECTOR_LABELS} labels")
            return
        for label, value in spec.node_selector.items():
            if not 1 <= len(label) <= MAX_LABEL_LENGTH:
                self.add(field, f"a label's name must be 1 to {MAX_LABEL_LENGTH} characters")
            if len(value) > MAX_LABEL_LENGTH:
                self.add(field, f"a label's value must be at most {MAX_LABEL_LENGTH} characters")

    def generation_spec(self, field: str, spec: fleet.GenerationSpec) -> None:
        if spec.HasField("max_wall_ms") and spec.max_wall_ms < 1:
            self.add(f"{field}.max_wall_ms", "must be at least 1; leave it out for the head's default")
        if spec.HasField("sampling"):
            self.sampling(f"{field}.sampling", spec.sampling)
        self.known(f"{field}.on_disconnect", spec.on_disconnect, _ON_DISCONNECT)
        self.known(f"{field}.qos_class", spec.qos_class, _QOS_CLASSES)
        if spec.stop:
            self._stop(f"{field}.stop", spec.stop)

    def _stop(self, field: str, stop: Sequence[types.TokenSequence]) -> None:
        if len(stop) > MAX_STOP_SEQUENCES:
            self.add(field, f"must hold at most {MAX_STOP_SEQUENCES} sequences")
            return
        for number, sequence in enumerate(stop):
            if not 1 <= len(sequence.token_ids) <= MAX_STOP_TOKENS:
                self.add(f"{field}[{number}].token_ids", f"must hold 1 to {MAX_STOP_TOKENS} tokens")


# FleetService


def check_create_session(request: fleet.CreateSessionRequest, limits: Limits) -> None:
    problems = _Problems()
    problems.optional_id("session_id", request.session_id)
    problems.session_spec("spec", request.spec, limits)
    problems.token_count("token_ids", len(request.token_ids), limits)
    problems.optional_id("request_id", request.request_id)
    problems.done()


SessionRequest = (
    fleet.GetSessionRequest
    | fleet.ParkSessionRequest
    | fleet.ResumeSessionRequest
    | fleet.FinishSessionRequest
)


def check_session_request(request: SessionRequest) -> None:
    """A request that names a session and asks for nothing else that could be wrong."""
    problems = _Problems()
    problems.need_id("session_id", request.session_id)
    problems.done()


def check_list_sessions(request: fleet.ListSessionsRequest) -> None:
    problems = _Problems()
    if request.page_size > MAX_PAGE_SIZE:
        problems.add("page_size", f"must be at most {MAX_PAGE_SIZE}; 0 stands for 100")
    if len(request.page_token) > MAX_PAGE_TOKEN_LENGTH:
        problems.add("page_token", "must be the next_page_token of the page before, or empty")
    problems.known("state", request.state, _SESSION_STATES)
    problems.optional_name("node", request.node)
    problems.done()


def check_append_tokens(request: fleet.AppendTokensRequest, limits: Limits) -> None:
    problems = _Problems()
    problems.need_id("session_id", request.session_id)
    if not request.token_ids and not request.HasField("truncate_to"):
        problems.add("token_ids", "is required unless truncate_to is given")
    problems.token_count("token_ids", len(request.token_ids), limits)
    problems.optional_id("request_id", request.request_id)
    problems.done()


def check_generate(request: fleet.GenerateRequest | fleet.GenerateAllRequest) -> None:
    problems = _Problems()
    problems.need_id("session_id", request.session_id)
    problems.chosen_generation_id(request.generation_id)
    problems.generation_spec("spec", request.spec)
    problems.optional_id("request_id", request.request_id)
    problems.done()


def check_complete(request: fleet.CompleteRequest, limits: Limits) -> None:
    problems = _Problems()
    problems.session_spec("session", request.session, limits)
    problems.token_count("token_ids", len(request.token_ids), limits)
    problems.generation_spec("spec", request.spec)
    problems.chosen_generation_id(request.generation_id)
    problems.optional_id("request_id", request.request_id)
    problems.done()


def check_generation_request(
    request: fleet.AttachGenerationRequest | fleet.CancelGenerationRequest,
) -> None:
    """A request that names a generation, its own or the head's."""
    problems = _Problems()
    problems.need_id("generation_id", request.generation_id)
    problems.done()


# AdminService

NodeRequest = (
    admin.GetNodeRequest
    | admin.RemoveNodeRequest
    | admin.CordonNodeRequest
    | admin.UncordonNodeRequest
    | admin.DrainNodeRequest
)


def check_node_request(request: NodeRequest) -> None:
    """A request about one node, by name or address."""
    problems = _Problems()
    problems.need_name("node", request.node)
    if isinstance(request, admin.RemoveNodeRequest) and is_name(request.node):
        problems.name_entry("node", request.node)
    if isinstance(request, admin.CordonNodeRequest | admin.DrainNodeRequest):
        if len(request.note) > MAX_NOTE_LENGTH:
            problems.add("note", f"must be at most {MAX_NOTE_LENGTH} characters")
        if len(request.by) > MAX_BY_LENGTH:
            problems.add("by", f"must be at most {MAX_BY_LENGTH} characters")
    problems.done()


def check_probe_nodes(request: admin.ProbeNodesRequest) -> None:
    problems = _Problems()
    if len(request.nodes) > MAX_PROBED_NODES:
        problems.add("nodes", f"must hold at most {MAX_PROBED_NODES} names; leave it empty for all nodes")
    else:
        for number, node in enumerate(request.nodes):
            problems.need_name(f"nodes[{number}]", node)
    problems.done()


def check_add_node(request: admin.AddNodeRequest) -> None:
    problems = _Problems()
    problems.need_name("address", request.address)
    if is_name(request.address):
        problems.name_entry("address", request.address)
    elif request.address:
        match = _HOST_PORT.fullmatch(request.address)
        if match is None or not 1 <= int(match["port"]) <= 65535:
            problems.add(
                "address",
                "must be host:port, like node-1.example:8454 or [2001:db8::7]:8454, or dns:///name:port",
            )
    problems.done()


def check_explain_placement(request: admin.ExplainPlacementRequest, limits: Limits) -> None:
    problems = _Problems()
    problems.optional_id("session_id", request.session_id)
    if not request.session_id:
        problems.session_spec("spec", request.spec, limits)
    elif request.HasField("spec"):
        problems.add("spec", "must be absent when session_id is given")
    problems.done()
