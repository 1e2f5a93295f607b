"""Imports without garbage collections."""

import gc
import subprocess
import sys

from piper.garbage import importing

CODE = """
import gc
from piper.garbage import importing

gc.unfreeze()
with importing():
    assert not gc.isenabled()
    made = [[] for _ in range(3)]
assert gc.isenabled()
assert gc.get_freeze_count() == 0
assert any(one is made for one in gc.get_objects(generation=2))
"""


def test_what_is_imported_counts_as_old() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_what_the_program_froze_stays_frozen() -> None:
    before = gc.get_freeze_count()
    assert before  # tests freeze what they import

    with importing():
        pass

    assert gc.get_freeze_count() == before
