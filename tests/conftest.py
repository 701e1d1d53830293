"""What holds for all tests."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def states() -> Iterator[Path]:
    """Holds the folders of heads that are given none; gone when the tests have ended."""
    with tempfile.TemporaryDirectory(prefix="fleet-tests-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def _heads_keep_apart(states: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test's heads begin with nothing, and never write to the home of whoever runs the tests."""
    monkeypatch.setenv("XDG_STATE_HOME", tempfile.mkdtemp(dir=states))
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
