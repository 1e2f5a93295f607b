"""A browser for the tests of a module, which open pages in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Whatever a test does, the page may not complain."""
    yield chromium
    assert chromium.problems == []
