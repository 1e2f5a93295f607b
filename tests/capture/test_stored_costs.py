"""Costs of regions are read from the cache, and counted where they cannot be."""

from pathlib import Path

import pytest

from piper.capture.cache.folder import folder_at
from piper.capture.description.description import Cost
from piper.capture.description.stored_costs import known_cost
from piper.names import B, F

COST = Cost(
    {F: 2.0, B: 4.0}, {F: 8}, {F: 0.5}, {F: 3}, {F: (0.5, 2)}, {F: 7},
    {F: ((4, 1), (2, 6))}, {F: ((4, 1),)},
)  # fmt: skip


def never() -> Cost:
    raise AssertionError("counted again")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path / "regions"))
    return tmp_path / "regions"


def test_a_cost_is_counted_once(folder: Path) -> None:
    known_cost("derivative", "code", lambda: COST)

    assert known_cost("derivative", "code", never) == COST


def test_other_derivatives_and_cuts_have_other_costs(folder: Path) -> None:
    known_cost("derivative", "code", lambda: COST)

    for entry, code in (("other", "code"), ("derivative", "other"), (None, "code")):
        with pytest.raises(AssertionError, match="counted again"):
            known_cost(entry, code, never)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"flops": {"F": 1}}', "numbers", "phases", "pairs"],
)
def test_an_entry_that_is_no_cost_is_ignored(folder: Path, text: str) -> None:
    known_cost("derivative", "code", lambda: COST)
    (file,) = folder.iterdir()
    good = file.read_text().partition("\n")[2]
    wrong = {
        "numbers": good.replace("4.0", '"4.0"'),
        "phases": good.replace('"B"', '"X"'),
        "pairs": good.replace("[0.5, 2]", "[0.5]"),
    }
    assert wrong.get(text, text) != good
    folder_at(folder).write(file.stem, wrong.get(text, text))

    assert known_cost("derivative", "code", lambda: COST) == COST
    assert file.read_text().partition("\n")[2] == good
