"""The `world` of the end-to-end tests, for the page's."""

from tests.e2e.conftest import world

__all__ = ["world"]
