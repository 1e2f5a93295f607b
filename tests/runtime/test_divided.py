"""Divided layers train as plain PyTorch does: tensor and sequence parallel, by hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from draws import one_of
from hand_divided import MODELS, Result, plainly, together

from piper.directives import Directive, Order, Place, Replicate, Shard, Split
from piper.errors import StrategyError
from piper.ir.filters import where
from piper.runtime.checkpoint.index import Index
from piper.runtime.checkpoint.pieces import saved_pieces
from piper.runtime.checkpoint.reader import Reader
from piper.runtime.checkpoint.writer import write_pieces
from piper.runtime.state.device_state import DeviceState

STEPS, MAX_NORM = 3, 0.5


@cache
def expected(name: str, stages: int, parts: int) -> Result:
    return plainly(name, stages, parts, STEPS, MAX_NORM)


def program(
    ways: int, copies: int, stages: int, zero: int | None, microbatches: int = 2
) -> list[Directive]:
    """Every stage on its own devices, groups side by side."""
    made: list[Directive] = []
    for stage in range(stages):
        size = ways * copies
        devices = list(range(stage * size, (stage + 1) * size))
        groups = [devices[k : k + ways] for k in range(0, size, ways)]
        made += [
            Place(where(PP=stage), devices),
            Shard(where(PP=stage), groups, what="weights"),
        ]
        if zero is not None:
            made.append(Replicate(where(PP=stage), devices, zero=zero))
    return [*made, Split("MB", microbatches)]


def agree(found: Result, wanted: Result) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-12)
    assert found.parameters.keys() == wanted.parameters.keys()
    for name, tensor in wanted.parameters.items():
        torch.testing.assert_close(found.parameters[name], tensor, rtol=1e-12, atol=1e-12)


@one_of(3)
@pytest.mark.parametrize(
    ("ways", "copies", "zero"),
    [(2, 1, None), (2, 1, 3), (4, 1, 1), (2, 2, 0), (2, 2, 1), (2, 2, 2), (2, 2, 3)],
)
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_plain_pytorch(name: str, ways: int, copies: int, zero: int | None) -> None:
    made = MODELS[name][0](ways)

    found = together(made, program(ways, copies, 1, zero), 2, STEPS, MAX_NORM)

    agree(found, expected(name, 1, 2 * copies))


F, B, BI, BW = ({"PASS": phase} for phase in ("F", "B", "BI", "BW"))
OVERLAPPED = [where(MB=0, **F), [where(MB=1, **F), where(MB=0, **B)], where(MB=1, **B)]
HALVES = [
    where(MB=0, **F),
    [where(MB=0, **BI), where(MB=1, **F)],
    where(MB=1, **BI),
    [where(MB=0, **BW), where(MB=1, **BW)],
]
PIPELINE = [
    [where(PP=0, MB=0, **F), where(PP=0, MB=1, **F), where(PP=0, MB=0, **B),
     where(PP=0, MB=1, **B)],
    [where(PP=1, MB=0, **F), where(PP=1, MB=0, **BI),
     [where(PP=1, MB=1, **F), where(PP=1, MB=0, **BW)], where(PP=1, MB=1, **BI),
     where(PP=1, MB=1, **BW)],
]  # fmt: skip


@one_of(2)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("slots", [OVERLAPPED, HALVES], ids=["overlapped", "halves"])
@pytest.mark.parametrize("name", MODELS)
def test_it_does_in_every_order(name: str, slots: list, zero: int) -> None:
    made = MODELS[name][0](2)

    found = together(made, [*program(2, 2, 1, zero), Order(slots)], 2, STEPS, MAX_NORM)

    agree(found, expected(name, 1, 4))


@one_of(2)
@pytest.mark.parametrize(("ordered", "zero"), [(True, 1), (False, 3)])
@pytest.mark.parametrize("name", MODELS)
def test_it_does_in_a_pipeline(name: str, ordered: bool, zero: int) -> None:
    made = MODELS[name][0](2, 2)
    orders = [Order(slots) for slots in PIPELINE] if ordered else []

    found = together(made, [*program(2, 2, 2, zero), *orders], 2, STEPS, MAX_NORM)

    agree(found, expected(name, 2, 4))


@one_of(3)
@pytest.mark.parametrize(("before", "after"), [((2, 0), (1, 0)), ((2, 1), (4, 0)), ((4, 3), (2, 3)),
                                               ((1, 0), (2, 2))])  # fmt: skip
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_goes_on_with_other_ways(
    name: str, before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    build = MODELS[name][0]
    states: dict[int, DeviceState] = {}
    (ways, zero), (more, other) = before, after
    copies = 4 // ways
    many = 4 // copies
    together(build(ways), program(ways, copies, 1, zero, many), many, 2, MAX_NORM, states)
    held = (saved_pieces(one, dict.fromkeys(one.buckets, (0, 1))) for one in states.values())
    pieces = {piece: tensor for each in held for piece, tensor in each}  # copies once
    files, stored = write_pieces(tmp_path, 0, list(pieces.items()))
    index = Index(2, "", 1, {}, (), (), tuple(files), tuple(stored), ())

    many = more
    found = together(
        build(more), program(more, 4 // more, 1, other, many), many, STEPS, MAX_NORM, first=2,
        resume=Reader(tmp_path, index),
    )  # fmt: skip

    wanted = expected(name, 1, 4)
    agree(found, Result(wanted.losses[2:], wanted.norms[2:], wanted.parameters))


def test_an_optimizer_of_whole_tensors_is_refused_on_pieces() -> None:
    made = MODELS["tensor"][0](2)

    with pytest.raises(StrategyError, match="may need whole parameters"):
        together(made, program(2, 1, 1, None), 2, 1, MAX_NORM, make=Normed)


class Normed(torch.optim.SGD):
    """Not one of torch's: it might look at norms of tensors."""
