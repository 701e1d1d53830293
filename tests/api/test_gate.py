"""What a caller without a token is told, by what the access file and its connection have."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_service.access_file import Entry, add_entry, hash_of
from fleet_service.api.access import AccessGate
from fleet_service.domain.access import Caller
from fleet_service.domain.errors import FleetError

METHOD = "fleet.v1.FleetService/ListSessions"


class Connection:
    """One whose client showed a certificate of these names."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": [name.encode() for name in self._names]}


def told(file: Path, *names: str) -> str:
    with pytest.raises(FleetError) as refused:
        AccessGate(file, lambda: 0.0).admit(METHOD, (), Connection(*names))
    return refused.value.message


def test_where_some_are_known_by_certificate_the_missing_one_is_hinted_at(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    add_entry(file, Entry(Caller("frontend"), hash_of("token")))
    assert told(file) == "send an access token as metadata, authorization: Bearer TOKEN"
    add_entry(file, Entry(Caller("gateway"), certificate="gateway.example"))
    assert "or connect with a client certificate: none was shown, or none is asked for here" in told(file)
    assert "nobody here is known by the client certificate of other.example" in told(file, "other.example")
