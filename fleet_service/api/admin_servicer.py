"""AdminService: shows and steers the fleet. Checks, converts, asks the head; decides nothing."""

from __future__ import annotations

from fleet.v1 import admin_service_pb2 as admin
from fleet.v1 import admin_service_pb2_grpc as admin_grpc
from fleet_service.api import convert_admin as convert
from fleet_service.api import convert_sessions, validate
from fleet_service.api.facade import OperatorsHead


class AdminServicer(admin_grpc.AdminServiceServicer):
    """The operators' service. Raises FleetError, which the interceptor turns into a status."""

    def __init__(self, head: OperatorsHead, limits: validate.Limits) -> None:
        self._head = head
        self._limits = limits

    async def ListNodes(self, request: admin.ListNodesRequest, context: object) -> admin.ListNodesResponse:
        return admin.ListNodesResponse(
            nodes=[convert.node_message(node) for node in self._head.list_nodes()],
            books_balance=self._head.books_balance,
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
        return admin.AddNodeResponse(node=convert.node_message(await self._head.add_node(request.address)))

    async def RemoveNode(self, request: admin.RemoveNodeRequest, context: object) -> admin.RemoveNodeResponse:
        validate.check_node_request(request)
        return admin.RemoveNodeResponse(node=convert.node_message(await self._head.remove_node(request.node)))

    async def CordonNode(self, request: admin.CordonNodeRequest, context: object) -> admin.CordonNodeResponse:
        validate.check_node_request(request)
        node = self._head.cordon_node(request.node, request.note)
        return admin.CordonNodeResponse(node=convert.node_message(node))

    async def UncordonNode(
        self, request: admin.UncordonNodeRequest, context: object
    ) -> admin.UncordonNodeResponse:
        validate.check_node_request(request)
        return admin.UncordonNodeResponse(node=convert.node_message(self._head.uncordon_node(request.node)))

    async def ExplainPlacement(
        self, request: admin.ExplainPlacementRequest, context: object
    ) -> admin.ExplainPlacementResponse:
        validate.check_explain_placement(request, self._limits)
        spec = convert_sessions.session_spec(request.spec) if request.HasField("spec") else None
        explanation = self._head.explain_placement(request.session_id, spec, request.prompt_tokens)
        return convert.explanation_message(explanation)
