"""The fleet token: its file, and the proofs that both ends of a link know it, which tell nobody what it is.

fleet.v1.HandshakeResponse says what is proven over what.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal

NONCE_BYTES = 32
PROOF_KEY = "fleet-proof-bin"
"""Metadata of a plain call: the head's nonce, then its proof."""

_KEY_BYTES = 32
_HEX = re.compile(rf"[0-9a-fA-F]{{{2 * _KEY_BYTES}}}")
Way = Literal["plain", "link", "join"]
"""How head and node speak. A proof for one way is none for another, so that nobody can pass it on between."""

_OWNER_ONLY = 0o600


class TokenError(Exception):
    """The token's file cannot be used; the text says why, and nothing of what it holds."""


def _nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class FleetToken:
    """The secret of a fleet, 32 bytes. `new_nonce` makes 32 random ones for each handshake."""

    def __init__(self, key: bytes, new_nonce: Callable[[], bytes] = _nonce) -> None:
        self._key = key
        self.new_nonce = new_nonce

    def proof(self, way: Way, head_nonce: bytes, node_nonce: bytes) -> bytes:
        """The head's own."""
        return self._mac(f"fleet.v1 head {way}", head_nonce, node_nonce)

    def accepts(self, way: Way, proof: bytes, head_nonce: bytes, node_nonce: bytes) -> bool:
        """Whether a node's proof is right; takes the same time wherever it is wrong."""
        return hmac.compare_digest(proof, self._mac(f"fleet.v1 node {way}", head_nonce, node_nonce))

    def _mac(self, label: str, head_nonce: bytes, node_nonce: bytes) -> bytes:
        return hmac.digest(self._key, label.encode() + head_nonce + node_nonce, hashlib.sha256)


def read_token(path: Path) -> FleetToken:
    """The token in a file that `fleet token` made. Raises TokenError."""
    try:
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TokenError(f"the fleet token cannot be read from {path}: {why}") from error
    if not _HEX.fullmatch(text):
        raise TokenError(
            f"{path} holds no fleet token: one is {2 * _KEY_BYTES} hexadecimal characters, here are "
            f"{len(text)} characters; `fleet token` makes one"
        )
    return FleetToken(bytes.fromhex(text))


def make_token(path: Path) -> bool:
    """Make the token's file, unless there is one; whether it was made. Raises TokenError.

    Two that make it at once agree on one: the file appears whole, and only the first stays.
    """
    if path.exists():
        read_token(path)
        return False
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")
            file.flush()
            os.fsync(handle)
        os.link(draft, path)
    except FileExistsError:
        read_token(path)
        return False
    except OSError as error:
        raise TokenError(f"the fleet token cannot be written to {path}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return True


def readable_by_others(path: Path) -> bool:
    """Whether any but the file's owner may read it."""
    return bool(stat.S_IMODE(path.stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH))
