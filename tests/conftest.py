"""Shared by all tests: golden files, and the same random examples in every run."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from itertools import groupby
from pathlib import Path
from zlib import crc32

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small, and threads that wait spin
os.environ.setdefault("PIPER_DEVICE", "cpu")  # also where there is a GPU; its tests say so
if "PIPER_CACHE" not in os.environ:  # of this run alone; its workers share it
    _CACHE = tempfile.TemporaryDirectory(prefix="piper-tests-")
    os.environ["PIPER_CACHE"] = _CACHE.name
gc.disable()  # until all tests are imported
GOLDEN = Path(__file__).parent / "golden"

settings.register_profile(
    "piper",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("piper")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write what is printed now to tests/golden"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with workers are marked by themselves. Of `one_of` cases, most are soaks."""
    for item in items:
        if has_workers(item):
            item.add_marker(pytest.mark.processes)
    for _, cases in groupby(items, function_of):
        leave_some(list(cases))


def function_of(item: pytest.Item) -> object:
    return getattr(item, "function", item)


def leave_some(cases: list[pytest.Item]) -> None:
    """The first case of a test stays, and others at random, which are the same in every run."""
    marker = cases[0].get_closest_marker("one_of")
    for case in cases[1:] if marker else ():
        if crc32(case.nodeid.encode()) % marker.args[0]:
            case.add_marker(pytest.mark.soak)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Tests have no doctests, and to look for them takes seconds."""
    return [one for one in (yield) if not isinstance(one, DoctestModule)]


def has_workers(item: pytest.Item) -> bool:
    return "run_on" in vars(getattr(item, "module", None) or object)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what was imported, so that garbage collections do not scan it again."""
    if session.config.getoption("collectonly"):
        return
    if any(map(has_workers, session.items)):
        import pool

        pool.start_early()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # graphs of many small objects live as long as their test
    gc.enable()


@pytest.fixture(autouse=True)
def arguments_of_the_command_line() -> Iterator[None]:
    """Commands that run a script in this process set them, and messages name the script."""
    before = sys.argv
    yield
    sys.argv = before


@pytest.fixture(scope="module")
def old_objects() -> None:
    """For modules that collect garbage again and again: not what earlier modules have left."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Leave what is alive to the end of the process: pytest would scan it several times."""
    gc.freeze()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file; `--update-golden` writes the file, for review as a diff."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert text == path.read_text(), f"{name} has changed: pytest --update-golden shows how"

    return compare
