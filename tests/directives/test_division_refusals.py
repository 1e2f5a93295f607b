"""Ways to divide weights or tokens that are not supported, and what to write instead."""

from __future__ import annotations

import pytest
from divided import divided_chain

from piper.directives import Directive, Place, Replicate, Shard, Split
from piper.errors import PiperError
from piper.ir.filters import where
from piper.job.compile.compiler import compile_strategy

FOUR, OTHERS = [0, 1, 2, 3], [4, 5, 6, 7]


def program(
    second: list[int], groups: list[list[int]], first: list[list[int]] | None = None,
    replicas: list[int] | None = None,
) -> list[Directive]:  # fmt: skip
    """Two stages: the first on four devices in two groups."""
    return [
        Place(where(PP=0), FOUR),
        Place(where(PP=1), second),
        Shard(where(PP=0), first or [[0, 1], [2, 3]], what="weights"),
        Shard(where(PP=1), groups, what="weights"),
        Replicate(where(PP=0), replicas or FOUR),
        Replicate(where(PP=1), second),
        Split("MB", 2),
    ]


CASES = {
    "a stage that a group cannot divide": (
        program([4, 5, 6], [[4, 5, 6]]),
        "strategy: PP1.0 is divided over 2 devices, but sharded over 3\n"
        "  fix: match each region with at most one `Shard`, whatever stage it is in",
    ),
    "groups of devices that are not those of Place": (
        program(OTHERS, [[4, 5], [6, 8]]),
        "shard (directive 4 of 7): PP1.0 is placed on devices [4, 5, 6, 7], not on [4, 5, 6, 8]\n"
        "  fix: write devices=[4, 5, 6, 7], or groups of them",
    ),
    "groups at other places": (
        program(OTHERS, [[4, 6], [5, 7]]),
        "strategy: PP0.0 is divided over [[0, 1], [2, 3]], which are not at the same places of its "
        "`Place` as the groups of other regions\n"
        "  fix: write the devices of each stage in the same order, those of a group side by side, "
        "in rising order: Place(..., [0, 1, 2, 3]), Shard(..., [[0, 1], [2, 3]])",
    ),
    "replicas that are not those of Place": (
        program(OTHERS, [[4, 5], [6, 7]], replicas=[0, 1]),
        "replicate (directive 5 of 7): PP0.0 is placed on devices [0, 1, 2, 3], not on [0, 1]\n"
        "  fix: write devices=[0, 1, 2, 3], or place it on [0, 1]",
    ),
    "groups of different lengths": (
        lambda: program(OTHERS, [[4, 5], [6, 7]], first=[[0, 1, 2], [3]]),
        "the groups [[0, 1, 2], [3]] have different lengths or a device in common\n"
        "  fix: write groups such as [[0, 1], [2, 3]]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_with_what_to_write(name: str) -> None:
    made, text = CASES[name]

    with pytest.raises(PiperError) as refused:
        compile_strategy(divided_chain(2), made() if callable(made) else made)

    assert text in str(refused.value)
