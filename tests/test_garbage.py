"""Imports without garbage collections."""

import subprocess
import sys

CODE = """
import gc
from piper.garbage import importing

gc.unfreeze()
with importing():
    assert not gc.isenabled()
    import fractions, colorsys, wave  # some that nothing has imported
    made = [[] for _ in range(3)]
assert gc.isenabled()
assert gc.get_freeze_count() == 0
assert any(one is made for one in gc.get_objects(generation=2))
"""


FROZEN = """
import gc
from piper.garbage import importing

gc.freeze()
before = gc.get_freeze_count()
assert before
with importing():
    import fractions, colorsys, wave
assert gc.get_freeze_count() == before
"""


def test_what_is_imported_counts_as_old() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)


def test_what_the_program_froze_stays_frozen() -> None:
    subprocess.run([sys.executable, "-c", FROZEN], check=True)
