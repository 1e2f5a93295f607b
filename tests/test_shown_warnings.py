"""Warnings say who warns, unless the program shows them in its own way."""

from __future__ import annotations

import subprocess
import sys

import pytest

WARNS = "import logging, piper; {} logging.getLogger('piper').warning('no effect')"
OWN = "logging.basicConfig(format='%(levelname)s %(message)s');"
ANOTHER = "logging.getLogger('piper').addHandler(logging.StreamHandler());"


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        ("", "piper: no effect\n"),
        (OWN, "WARNING no effect\n"),
        (ANOTHER, "no effect\n"),
        ("logging.getLogger('piper').info('less');", "piper: no effect\n"),
        ("logging.getLogger('piper').setLevel('ERROR');", ""),
        ("import sys; sys.stderr = None;", ""),
    ],
    ids=["nothing", "its own", "another", "less", "silenced", "closed"],
)
def test_a_warning_is_shown_once(before: str, shown: str) -> None:
    command = [sys.executable, "-c", WARNS.format(before)]

    assert subprocess.run(command, capture_output=True, text=True).stderr == shown
