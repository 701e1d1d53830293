"""The calls of the contract that callers and operators make, by their full names."""

from __future__ import annotations

from fleet.v1 import admin_service_pb2, fleet_service_pb2

METHODS: tuple[str, ...] = tuple(
    f"{service.full_name}/{method.name}"
    for contract in (fleet_service_pb2, admin_service_pb2)
    for service in contract.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
"""Like fleet.v1.FleetService/Generate."""
