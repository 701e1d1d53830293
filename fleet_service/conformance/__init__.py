"""Checks whether a node keeps the node rules (docs/node-contract.md), by speaking NodeService with it."""
