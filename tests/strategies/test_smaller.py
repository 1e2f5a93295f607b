"""Changes of a strategy that need less memory."""

from __future__ import annotations

import pytest

from piper.directives import Place, Remat, Replicate, Split, Strategy
from piper.ir.filters import where
from piper.strategies import BUILDERS, one_f_one_b
from piper.strategies.smaller import smaller, with_microbatches


def test_they_are_written_as_for_a_builder() -> None:
    given = {"pp": 2, "dp": 2, "microbatches": 4}
    found = dict(smaller(one_f_one_b(**given, zero=2)))

    assert list(found) == [
        'remat="auto"',
        'remat="matmuls"',
        'remat="attention"',
        "remat=True",
        'offload="activations"',
        'offload="optimizer"',
        'offload="parameters"',
        'offload=["activations", "optimizer"]',
        'offload=["optimizer", "parameters"]',
        'offload=["activations", "optimizer", "parameters"]',
        "zero=3",
        'zero=3, remat="auto"',
        'remat=True, offload=["activations", "optimizer", "parameters"]',
        'zero=3, remat=True, offload=["activations", "optimizer", "parameters"]',
        "microbatches=8",
        'microbatches=8, remat="auto"',
        "microbatches=16",
        'microbatches=16, remat="auto"',
    ]
    assert found["zero=3"] == one_f_one_b(**given, zero=3)
    assert set(found["remat=True"]) == set(one_f_one_b(**given, zero=2, remat=True))
    both = one_f_one_b(**given, zero=2, offload=["activations", "optimizer"])
    assert set(found['offload=["activations", "optimizer"]']) == set(both)
    assert found["microbatches=8"] == one_f_one_b(**{**given, "microbatches": 8}, zero=2)


def test_what_is_recomputed_already_is_replaced() -> None:
    found = dict(smaller(one_f_one_b(pp=2, microbatches=4, remat=[0])))

    assert [one for one in found["remat=True"] if isinstance(one, Remat)] == [Remat(where())]
    assert not any(name.startswith("zero") for name in found)


@pytest.mark.parametrize("name", set(BUILDERS) - {"dualpipe"})
@pytest.mark.parametrize("more", [{}, {"dp": 2, "ep": 2}])
def test_other_microbatches_are_those_of_the_builder(name: str, more: dict[str, int]) -> None:
    build = BUILDERS[name]

    found = with_microbatches(build(pp=2, microbatches=4, **more), 8)

    assert found == build(pp=2, microbatches=8, **more)


def test_strategies_without_a_known_schedule() -> None:
    plain = Strategy([Place(where(), [0, 1]), Replicate(where(), [0, 1])])
    other = Strategy([one for one in one_f_one_b(2, 4) if not isinstance(one, Split)])

    assert with_microbatches(plain, 2) == plain + Split("MB", 2)
    assert with_microbatches(Strategy([*other, Split("PART", 4)]), 8) is None
