"""AdminService: shows and steers the fleet. Checks, converts, asks the head; decides nothing."""

from __future__ import annotations

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import admin_service_pb2_grpc as admin_grpc
from fleet_service.addresses import is_name, node_entry
from fleet_service.api import convert_admin as convert
from fleet_service.api import convert_sessions, convert_watch, validate
from fleet_service.api.facade import Call, OperatorsHead
from fleet_service.runtime.fairness import in_turns
from fleet_service.runtime.views import DrainState


class AdminServicer(admin_grpc.AdminServiceServicer):
    """The operators' service. Raises FleetError, which the interceptor turns into a status."""

    def __init__(self, head: OperatorsHead, limits: validate.Limits) -> None:
        self._head = head
        self._limits = limits

    async def ListNodes(self, request: admin.ListNodesRequest, context: object) -> admin.ListNodesResponse:
        nodes = await self._head.all_nodes()
        return admin.ListNodesResponse(
            nodes=[convert.node_message(node) async for node in in_turns(nodes)],
            books_balance=self._head.books_balance,
            names=[convert.name_message(name) for name in self._head.list_names()],
        )

    async def GetNode(self, request: admin.GetNodeRequest, context: object) -> admin.GetNodeResponse:
        validate.check_node_request(request)
        return admin.GetNodeResponse(node=convert.node_message(self._head.get_node(request.node)))

    async def ProbeNodes(self, request: admin.ProbeNodesRequest, context: object) -> admin.ProbeNodesResponse:
        validate.check_probe_nodes(request)
        probes = await self._head.probe_nodes(tuple(request.nodes))
        return admin.ProbeNodesResponse(probes=[convert.probe_message(probe) for probe in probes])

    async def AddNode(self, request: admin.AddNodeRequest, context: object) -> admin.AddNodeResponse:
        validate.check_add_node(request)
        if is_name(request.address):
            name = await self._head.add_name(node_entry(request.address))
            return admin.AddNodeResponse(name=convert.name_message(name))
        return admin.AddNodeResponse(node=convert.node_message(await self._head.add_node(request.address)))

    async def RemoveNode(self, request: admin.RemoveNodeRequest, context: object) -> admin.RemoveNodeResponse:
        validate.check_node_request(request)
        if is_name(request.node):
            name = await self._head.remove_name(node_entry(request.node))
            return admin.RemoveNodeResponse(name=convert.name_message(name))
        return admin.RemoveNodeResponse(node=convert.node_message(await self._head.remove_node(request.node)))

    async def CordonNode(  # type: ignore[override]
        self, request: admin.CordonNodeRequest, context: Call
    ) -> admin.CordonNodeResponse:
        validate.check_node_request(request)
        node = self._head.cordon_node(request.node, request.note, _who(request, context))
        await self._head.settled()
        return admin.CordonNodeResponse(node=convert.node_message(node))

    async def UncordonNode(
        self, request: admin.UncordonNodeRequest, context: object
    ) -> admin.UncordonNodeResponse:
        validate.check_node_request(request)
        node = self._head.uncordon_node(request.node)
        await self._head.settled()
        return admin.UncordonNodeResponse(node=convert.node_message(node))

    # Streams are coroutines that write, as in fleet_servicer.py.

    async def DrainNode(  # type: ignore[override]
        self, request: admin.DrainNodeRequest, context: Call
    ) -> None:
        validate.check_node_request(request)
        progress = self._head.drain_node(request.node, request.note, _who(request, context))
        try:
            await self._head.settled()
            under_way = True
            while under_way:
                name, drain = await progress.read()
                await context.write(convert_watch.drain_response(name, drain))
                under_way = drain.state is DrainState.DRAINING
        finally:
            progress.close()

    async def WatchFleet(  # type: ignore[override]
        self, request: admin.WatchFleetRequest, context: Call
    ) -> None:
        watcher = self._head.watch_fleet(with_turns=not request.without_events)
        try:
            while (change := await watcher.read()) is not None:
                nodes = [convert.node_message(node) async for node in in_turns(change.nodes)]
                await context.write(convert_watch.change_message(change, nodes))
        finally:
            watcher.close()

    async def ExplainPlacement(
        self, request: admin.ExplainPlacementRequest, context: object
    ) -> admin.ExplainPlacementResponse:
        validate.check_explain_placement(request, self._limits)
        spec = convert_sessions.session_spec(request.spec) if request.HasField("spec") else None
        explanation = self._head.explain_placement(request.session_id, spec, request.prompt_tokens)
        verdicts = [convert.verdict_message(verdict) async for verdict in in_turns(explanation.verdicts)]
        return convert.explanation_message(explanation, verdicts)


def _who(request: admin.CordonNodeRequest | admin.DrainNodeRequest, call: Call) -> str:
    """Who orders it: as the head knows the caller, else as it calls itself."""
    return call.caller.name or request.by
