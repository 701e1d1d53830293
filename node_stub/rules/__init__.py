"""The node rules: a pure state machine that decides what a node does with each command.

No I/O, no clock, no randomness: time comes in as `now_ms`, a reading of the node's monotonic clock.
"""

from node_stub.rules.checks import BLOCK_TOKENS, blocks_of
from node_stub.rules.context import Context, context_crc32, packed
from node_stub.rules.leases import Owner
from node_stub.rules.node import Fenced, Holding, Limits, NodeRules, Stopped
from node_stub.rules.values import (
    Admission,
    Append,
    Assign,
    CancelOutcome,
    Code,
    Command,
    Generate,
    Model,
    Refusal,
    Sampling,
    term_of,
)

__all__ = [
    "BLOCK_TOKENS",
    "Admission",
    "Append",
    "Assign",
    "CancelOutcome",
    "Code",
    "Command",
    "Context",
    "Fenced",
    "Generate",
    "Holding",
    "Limits",
    "Model",
    "NodeRules",
    "Owner",
    "Refusal",
    "Sampling",
    "Stopped",
    "blocks_of",
    "context_crc32",
    "packed",
    "term_of",
]
