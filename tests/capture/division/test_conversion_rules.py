"""Messages along one axis, of tensors that are divided along another: a grid of devices."""

from __future__ import annotations

import pytest
import torch
from capture.division.trials import Trial, gradient, joined, piece
from draws import levels_of
from torch import Tensor

from piper.capture.graphs.division.calls import Option
from piper.capture.graphs.division.rules import options_of
from piper.capture.kernels.conversion import CONVERT
from piper.ir.placement.placements import STEPS, Cut, Partial, Step

PAIRS = sorted({pair for pair in STEPS.values() if set(pair) - {Step.NOTHING, Step.SLICE}})
BLOCKS = (1, 2, 3, 6)


def sent(step: Step, given: list[Tensor]) -> list[Tensor]:
    """What each of several devices has after a message."""
    ways = len(given)
    match step:
        case Step.NOTHING:
            return given
        case Step.ALL_REDUCE:
            return [sum(given[1:], given[0])] * ways
        case Step.ALL_GATHER:
            return [torch.cat(given)] * ways
        case Step.REDUCE_SCATTER:
            return list(sum(given[1:], given[0]).chunk(ways))
        case Step.SLICE:
            return [one.chunk(ways)[k] for k, one in enumerate(given)]
        case Step.SHIFT:
            return [given[k - 1] for k in range(ways)]
        case Step.SHIFT_BACK:
            return [given[(k + 1) % ways] for k in range(ways)]
        case Step.ALL_TO_ALL:
            return [torch.cat([one.chunk(ways)[k] for one in given]) for k in range(ways)]


def compare(step: Step, option: Option, ways: int, values: list[Tensor]) -> None:
    """`values` are those of devices along the first axis; each has `ways` along the second."""
    read, written = option.inputs[0], option.output
    wanted = sent(step, values)
    columns = [
        sent(step, [piece(one, read, ways, rank).contiguous() for one in values])
        for rank in range(ways)
    ]
    for k, whole in enumerate(wanted):
        found = joined([column[k] for column in columns], written)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


def both_passes(pair: tuple[Step, Step], option: Option, ways: int, along: int) -> None:
    forward, backward = pair
    draw = torch.Generator().manual_seed(ways)
    given = [torch.randn(144, 24, generator=draw, dtype=torch.float64) for _ in range(along)]
    compare(forward, option, ways, given)
    like = sent(forward, given)
    gradients = [torch.randn(one.shape, generator=draw, dtype=one.dtype) for one in like]
    back = Option((gradient(option.output),), gradient(option.inputs[0]))
    compare(backward, back, ways, gradients)


def options(pair: tuple[Step, Step], ways: int, along: int) -> list[Option]:
    steps = str(pair[0]), str(pair[1])
    meta = torch.empty(144, 24, dtype=torch.float64, device="meta")
    return options_of(Trial(CONVERT, (meta, *steps, along), {}, BLOCKS).call(ways))


@pytest.mark.parametrize(("pair", "along"), levels_of(PAIRS, [2, 3], nth=2))
def test_devices_of_a_grid_send_what_undivided_devices_send(
    pair: tuple[Step, Step], along: int
) -> None:
    for ways in (2, 3, 4):
        found = options(pair, ways, along)
        for option in found:
            both_passes(pair, option, ways, along)

        assert len(found) > 4


MISTAKES = {
    "gathered in the blocks of one": (
        (Step.ALL_GATHER, Step.REDUCE_SCATTER), Option((Cut(0),), Cut(0))),
    "scattered in the blocks of all": (
        (Step.REDUCE_SCATTER, Step.ALL_GATHER), Option((Cut(0),), Cut(0))),
    "exchanged in one block": ((Step.ALL_TO_ALL, Step.ALL_TO_ALL), Option((Cut(0),), Cut(0))),
    "parts taken as whole": ((Step.ALL_REDUCE, Step.NOTHING), Option((Partial(),), Cut(1))),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    pair, option = MISTAKES[mistake]

    with pytest.raises(AssertionError):
        both_passes(pair, option, 2, 2)
