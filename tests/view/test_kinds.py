"""One colour for one thing, in every page and picture."""

from itertools import combinations

from piper.ir.placement.placements import Step
from piper.view.kinds import KINDS, MEMORY


def apart(first: str, second: str) -> float:
    return sum(
        abs(int(first[k : k + 2], 16) - int(second[k : k + 2], 16)) for k in (1, 3, 5)
    )  # of red, green and blue


def test_no_two_kinds_of_work_or_memory_have_a_similar_colour() -> None:
    fills = {name: fill for name, (_, fill) in KINDS.items()} | MEMORY

    close = [(a, b) for a, b in combinations(fills, 2) if apart(fills[a], fills[b]) < 40]

    assert close == []


def test_every_message_has_a_word_and_a_colour() -> None:
    silent = {Step.NOTHING, Step.SLICE}  # no messages

    assert {str(step) for step in set(Step) - silent} <= set(KINDS)
