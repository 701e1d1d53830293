"""The fleet token as a node uses it: proofs that both ends know it, which tell nobody what it is.

fleet.v1.HandshakeResponse says what is proven over what.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal

NONCE_BYTES = 32
PROOF_KEY = "fleet-proof-bin"
"""Metadata of a plain call: the head's nonce, then its proof."""

_HEX_CHARS = 64
Way = Literal["plain", "link", "join"]
"""How head and node speak. A proof for one way is none for another, so that nobody can pass it on between."""


class TokenError(Exception):
    """The token's file cannot be used; the text says why, and nothing of what it holds."""


class FleetToken:
    """The secret of a fleet. `nonce` makes 32 random bytes."""

    def __init__(
        self, key: bytes, nonce: Callable[[], bytes] = lambda: secrets.token_bytes(NONCE_BYTES)
    ) -> None:
        self._key = key
        self.new_nonce = nonce
        self.own_nonce = nonce()
        """That of plain calls: one for the life of the process, as no call knows its connection."""

    def proof(self, way: Way, head_nonce: bytes, node_nonce: bytes) -> bytes:
        """The node's own."""
        return self._mac(f"fleet.v1 node {way}", head_nonce, node_nonce)

    def accepts(self, way: Way, proof: bytes, head_nonce: bytes, node_nonce: bytes) -> bool:
        """Whether a head's proof is right; takes the same time wherever it is wrong."""
        return hmac.compare_digest(proof, self._mac(f"fleet.v1 head {way}", head_nonce, node_nonce))

    def accepts_metadata(self, value: bytes) -> bool:
        """Whether a plain call's proof is right."""
        return self.accepts("plain", value[NONCE_BYTES:], value[:NONCE_BYTES], self.own_nonce)

    def _mac(self, label: str, head_nonce: bytes, node_nonce: bytes) -> bytes:
        return hmac.digest(self._key, label.encode() + head_nonce + node_nonce, hashlib.sha256)


def read_token(path: Path) -> FleetToken:
    """The token in a file that `fleet token` made. Raises TokenError."""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TokenError(f"the fleet token cannot be read from {path}: {why}") from error
    if not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX_CHARS}}}", text):
        raise TokenError(
            f"{path} holds no fleet token: one is {_HEX_CHARS} hexadecimal characters, here are "
            f"{len(text)} characters; `fleet token` makes one"
        )
    return FleetToken(bytes.fromhex(text))
