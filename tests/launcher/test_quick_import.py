"""Large modules are imported without garbage collections, and otherwise as ever."""

import gc
import sys
from pathlib import Path

import pytest

from piper.launcher.quick_import import import_quickly


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large_one.py").write_text("import gc\ncollects = gc.isenabled()\n")
    (tmp_path / "wrong_one.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])


def test_a_module_is_imported_without_collections(large: None) -> None:
    before = [*sys.meta_path]

    import_quickly("large_one")
    import large_one

    assert not large_one.collects
    assert large_one.__spec__.name == "large_one"
    assert gc.isenabled()
    assert sys.meta_path == before


def test_errors_of_a_module_are_its_own(large: None) -> None:
    import_quickly("wrong_one")
    with pytest.raises(ZeroDivisionError):
        import wrong_one  # noqa: F401

    assert gc.isenabled()


def test_a_module_that_is_missing_is_missing(large: None) -> None:
    import_quickly("no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import no_such_module  # noqa: F401
