"""What is wrong with a fleet and what to do about it, out of what a head says of both. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fleet.v1.admin_service_pb2 import (
    DRAIN_STATE_DRAINING,
    NODE_STATE_CONNECTING,
    NODE_STATE_DOWN,
    NODE_STATE_SUSPECT,
    NODE_STATE_UP,
    DnsName,
    Node,
    NodeProbe,
)
from fleet_service.cli.node_text import has_joined, is_emptied, kept_from_work
from fleet_service.cli.output import count, duration
from fleet_service.grpc_causes import (
    CERTIFICATE_EARLY,
    CERTIFICATE_EXPIRED,
    CERTIFICATE_NAME,
    CERTIFICATE_UNKNOWN,
    CLOSED,
    NAME_NOT_FOUND,
    NO_ANSWER,
    NOT_TLS,
    REFUSED,
    TLS_FAILED,
)

_CONNECTING = "its first connection is being made"

# What to do about a connection that failed, by words in the head's account of it.
_CONNECTION_ADVICE = {
    REFUSED: "start the node, or check its address and port",
    NO_ANSWER: "see that its machine runs and that a firewall lets the head through, or check its address",
    NAME_NOT_FOUND: "check the host name, or give the address in numbers",
    "cannot be looked up": "check the host name, or give the address in numbers",
    "no route to host": "check the address, and the way from the head's machine to it",
    "network is unreachable": "check the address, and the way from the head's machine to it",
    CERTIFICATE_EXPIRED: "put a new certificate into the node's files: it reads them again without a restart",
    CERTIFICATE_EARLY: "compare the clocks of head and node, or give the node a certificate of today",
    CERTIFICATE_UNKNOWN: "name the CA that signed it in the head's setting node_tls.ca_file",
    CERTIFICATE_NAME: "dial it by the name in its certificate, or set node_tls.server_name to that",
    NOT_TLS: "give the node a certificate, or set the head's node_tls.enabled to false",
    TLS_FAILED: "see that head and node agree on TLS; the node's log may say more",
    CLOSED: "see that head and node agree on TLS, and that it is a node's port; the node's log may say more",
    "did not answer the handshake": "the node hangs or is overloaded: see its log, and restart it",
}
_REFUSAL = re.compile(r"(?P<what>.*refused the handshake): (?P<do>.*?) \((?P<said>.*)\)")


# How advice at the end of an account begins; any other last part is but a part of what happened.
_ADVICE_BEGINS = ("check ", "compare ", "give ", "restart ", "upgrade ", "use ", "wait ")


class Severity(StrEnum):
    """ERROR: work is refused or capacity is lost. WARNING: it soon may be. NOTE: as somebody wanted it."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Callers(StrEnum):
    """Health of the callers' listener. DRAINING: the head is about to end. UNREACHABLE: not a word."""

    SERVING = "serving"
    NOT_SERVING = "not_serving"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know: what it is and what to do. `node` is a node's name; empty = the head or several."""

    severity: Severity
    node: str
    what: str
    do: str


@dataclass(frozen=True, slots=True)
class HeadSeen:
    """The head as a whole. Where its callers' listener is unreachable: why, and what to do.

    `store_trouble`: why nothing can be kept on disk; empty = all is well.
    """

    callers: Callers
    callers_detail: str
    books_balance: bool
    callers_advice: str = ""
    store_trouble: str = ""


def findings(
    head: HeadSeen, nodes: Sequence[Node], probes: Mapping[str, NodeProbe], names: Sequence[DnsName] = ()
) -> list[Finding]:
    """All there is to find, errors first. `probes` by the address dialed; a node may have none."""
    found = [*_of_head(head, nodes), *_of_names(names), *_of_models(nodes)]
    for node in nodes:
        found += _of_node(node, probes.get(node.address))
    # A stable sort: within a severity, the head comes first and the nodes follow in their order.
    return sorted(found, key=lambda each: list(Severity).index(each.severity))


def healthy(found: Iterable[Finding]) -> bool:
    """Nothing is wrong; notes are not wrong."""
    return all(each.severity is Severity.NOTE for each in found)


def nothing_kept(trouble: str) -> str:
    """A head whose store fails, in a line."""
    return f"nothing can be kept on disk: {trouble}; new work is refused and streams wait"


def advised(detail: str) -> tuple[str, str]:
    """The head's account of a failure, as (what happened, what to do)."""
    for words, advice in _CONNECTION_ADVICE.items():
        if words in detail and "refused the handshake" not in detail:
            return detail, advice
    what, do = _parted(detail)
    return what, do or "see the node's log and the head's"


def _parted(detail: str) -> tuple[str, str]:
    """The account, and the advice that the head put into it; "" where there is none."""
    if refusal := _REFUSAL.fullmatch(detail):
        return f"{refusal['what']} ({refusal['said']})", refusal["do"]
    for separator in ("; ", ": "):
        what, _, do = detail.rpartition(separator)
        if what and do.startswith(_ADVICE_BEGINS):
            return what, do
    return detail, ""


def _of_head(head: HeadSeen, nodes: Sequence[Node]) -> Iterator[Finding]:
    usable = [node for node in nodes if node.state == NODE_STATE_UP]
    if head.store_trouble:
        yield Finding(
            Severity.ERROR,
            "",
            nothing_kept(head.store_trouble),
            "make room there, or mend what is wrong: once it can be written again, all goes on by itself",
        )
    if head.callers is Callers.UNREACHABLE:
        yield Finding(
            Severity.ERROR,
            "",
            f"callers cannot reach the head: {head.callers_detail}",
            head.callers_advice
            or "say where it listens for callers with --address HOST:PORT, or see its settings listen.*",
        )
    elif head.callers is Callers.DRAINING:
        yield Finding(
            Severity.ERROR,
            "",
            "the head is shutting down and takes no new work",
            "wait until it is gone and start it again, or ask another",
        )
    elif head.callers is Callers.NOT_SERVING and usable and not head.store_trouble:
        yield Finding(
            Severity.WARNING,
            "",
            "callers are told NOT_SERVING though a node is up",
            "look again: a node that has just come up shows in the health within a second; see the head's log"
            " if it stays so",
        )
    if not nodes:
        yield Finding(Severity.ERROR, "", "the head has no nodes", "add one with `fleet nodes add HOST:PORT`")
    elif not usable:
        yield Finding(
            Severity.ERROR, "", "no node is up: callers are refused", "see to the nodes below, or add one"
        )
    elif all(node.cordoned for node in usable):
        yield Finding(
            Severity.ERROR,
            "",
            f"every node that is up is {_kept(usable)}: new work is refused",
            "let work on one again with `fleet uncordon NODE`, or add a node",
        )
    if not head.books_balance:
        odd = [node.name for node in nodes if node.reservations != node.running + node.queued]
        yield Finding(
            Severity.ERROR,
            "",
            "reservations do not equal the work on the nodes"
            + (f" (here: {', '.join(odd)})" if odd else " (they do again by now)"),
            "that is a fault of the head: keep its log and report it; restart it when it can be spared",
        )


def _kept(nodes: Sequence[Node]) -> str:
    """How all of them are kept from new work."""
    drained = sum(node.HasField("drain") for node in nodes)
    if drained == len(nodes):
        return "drained"
    return "cordoned or drained" if drained else "cordoned"


def _of_names(names: Sequence[DnsName]) -> Iterator[Finding]:
    for name in names:
        if name.failure:
            known = len(name.addresses)
            kept = f"; {count(known, 'address')} known from before" if known else ""
            yield Finding(
                Severity.WARNING if known else Severity.ERROR,
                "",
                f"{name.name} cannot be looked up: {name.failure}{kept}",
                "check the name, and the DNS that the head's machine asks",
            )
        if name.left_out:
            yield Finding(
                Severity.WARNING,
                "",
                f"{count(name.left_out, 'address')} of {name.name} left out by a limit",
                "raise the head's setting links.max_addresses_per_name or head.max_nodes; its log says which",
            )


def _of_models(nodes: Sequence[Node]) -> Iterator[Finding]:
    """What nodes that serve the same model disagree about."""
    for name in sorted({model.name for node in nodes for model in node.models}):
        revisions: dict[str, list[str]] = {}
        windows: dict[int, list[str]] = {}
        for node in nodes:
            for model in node.models:
                if model.name == name:
                    revisions.setdefault(model.revision, []).append(node.name)
                    windows.setdefault(model.max_context_tokens, []).append(node.name)
        if len(revisions) > 1:
            told = "; ".join(
                f"{key or 'unnamed'} on {', '.join(revisions[key])}" for key in sorted(revisions)
            )
            yield Finding(
                Severity.WARNING,
                "",
                f"model {name} is served in {count(len(revisions), 'revision')}: {told}",
                "give all its nodes one revision: a session can only go on on nodes of its own",
            )
        elif len(windows) > 1:
            told = "; ".join(f"{window(key)} on {', '.join(windows[key])}" for key in sorted(windows))
            yield Finding(
                Severity.NOTE,
                "",
                f"model {name} has windows of different lengths: {told}",
                "a long session can only go on on the wider ones: keep two of them",
            )


def window(tokens: int) -> str:
    """A model's longest context, in tokens; 0 = the node does not say, which holds anything."""
    return str(tokens) if tokens else "any"


def _of_node(node: Node, probe: NodeProbe | None) -> Iterator[Finding]:
    yield from _of_connection(node, probe)
    if node.cordoned:
        again = f"let work on it again with `fleet uncordon {node.name}`"
        if node.HasField("drain") and node.drain.state == DRAIN_STATE_DRAINING:
            do = f"see it with `fleet drain {node.name} --wait`, or {again}"
        elif is_emptied(node) and node.state == NODE_STATE_DOWN:
            return  # told above
        elif node.HasField("drain"):
            do = f"stop it, or take it out with `fleet nodes remove {node.name}`, or {again}"
        else:
            do = again
        yield Finding(Severity.NOTE, node.name, kept_from_work(node), do)
    if node.unlisted:
        yield Finding(
            Severity.NOTE,
            node.name,
            f"no more listed by {node.found_by}, so it gets no new work",
            "it is forgotten once it is down; see to the DNS where it is to stay",
        )
    if node.state == NODE_STATE_UP:
        yield from _of_what_it_says(node)
        yield from _of_lanes(node)


def _of_connection(node: Node, probe: NodeProbe | None) -> Iterator[Finding]:
    joined = has_joined(node)
    failed = "" if joined or probe is None or probe.reachable else probe.detail
    answers = probe is not None and probe.reachable
    if node.state == NODE_STATE_DOWN and is_emptied(node):
        yield Finding(
            Severity.NOTE,
            node.name,
            f"down, after it was drained: {node.state_detail or failed or 'it has not dialed in'}",
            f"take it out with `fleet nodes remove {node.name}`, or start it again and `fleet uncordon` it",
        )
    elif node.state == NODE_STATE_DOWN and joined:
        what = f"down: {node.state_detail}" if node.state_detail else "down: it has not dialed in"
        yield Finding(
            Severity.ERROR, node.name, what, "it has to dial this head: start it, and see its log for why not"
        )
    elif node.state == NODE_STATE_DOWN and answers:
        # A lost connection is behind it now, and the next dial shows it; a refusal by the head stays.
        what, do = _parted(node.state_detail)
        yield Finding(
            Severity.ERROR,
            node.name,
            f"it answers a handshake, and yet is down: {what}",
            do or "look again in a few seconds: the head dials it again",
        )
    elif node.state == NODE_STATE_DOWN:
        what, do = advised(failed or node.state_detail)
        yield Finding(Severity.ERROR, node.name, f"down: {what}", do)
    elif node.state == NODE_STATE_CONNECTING:
        what, do = advised(failed) if failed else ("nothing came of it yet", "look again in a few seconds")
        yield Finding(Severity.ERROR if failed else Severity.WARNING, node.name, f"{_CONNECTING}: {what}", do)
    elif node.state == NODE_STATE_SUSPECT:
        yield Finding(
            Severity.WARNING,
            node.name,
            f"suspect, so it gets no new work: {node.state_detail or failed}",
            "look again in a few seconds: it comes back, or is down and its work goes on elsewhere",
        )
    elif failed:
        what, do = advised(failed)
        yield Finding(Severity.WARNING, node.name, f"up, but it takes no new connection: {what}", do)
    if answers and probe is not None and node.incarnation and probe.identity != node.name:
        yield Finding(
            Severity.WARNING,
            node.name,
            f"another node answers at {node.address}: {probe.identity}",
            "check which node is to be at that address, and `fleet nodes remove` the other",
        )


def _of_what_it_says(node: Node) -> Iterator[Finding]:
    if node.reports_stale:
        yield Finding(
            Severity.WARNING,
            node.name,
            f"its last report is {duration(node.report_age_ms)} old, though it lives",
            "see its log; until it reports again the head goes by its own counts",
        )
    if not node.models:
        yield Finding(
            Severity.ERROR,
            node.name,
            "it serves no model, so it gets no work",
            "start it with a model, or take it out with `fleet nodes remove`",
        )
    if node.outbox:
        yield Finding(
            Severity.NOTE,
            node.name,
            f"{count(node.outbox, 'revoke')} owed to it though it is up",
            "look again; if they stay, the head's log says why under revoke_refused or revoke_unanswered",
        )
    limit = node.report.max_sessions
    if limit and node.report.active_sessions >= limit:
        yield Finding(
            Severity.NOTE,
            node.name,
            f"it holds {node.report.active_sessions} sessions, of {limit} that it can",
            "finish or park sessions, raise its limit, or add a node",
        )


def _of_lanes(node: Node) -> Iterator[Finding]:
    own = node.report.max_lanes
    if own > node.lanes:
        yield Finding(
            Severity.NOTE,
            node.name,
            f"it has {count(own, 'lane')}; the head uses {node.lanes}",
            "to use all, raise the head's setting head.max_lanes_per_node, or head.lanes_per_node where set",
        )
    elif 0 < own < node.lanes:
        yield Finding(
            Severity.WARNING,
            node.name,
            f"the head uses {count(node.lanes, 'lane')}; it has only {own}",
            "lower the head's setting head.lanes_per_node, or leave it at 0 to go by what nodes say",
        )
