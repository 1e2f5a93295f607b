"""Strategies of the literature: their schedules are legal, and train as plain PyTorch."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import replicas
import torch
from draws import every, one_of
from shared_capture import using
from synthetic import chain
from torch import nn
from torch.nn.functional import mse_loss

from piper import Place, Strategy, Trainer, strategies
from piper.capture import Captured, capture
from piper.ir.by_device.schedule_rows import dag_rows
from piper.ir.nodes import Collective, Kind
from piper.ir.placement.replicas import replicas as replicas_of
from piper.job.compile.compiler import compile_strategy
from piper.job.inspection import Inspected, inspecting
from piper.job.numerics import compare
from piper.strategies.timing import STEPS, start_times
from piper.view.schedule_grid import summary

FOLDER = Path(__file__).parents[2] / "examples" / "literature"
LAYERS, ROWS = 8, 2  # of the model; of each microbatch


@cache
def small() -> tuple[nn.Module, Captured]:
    """Eight stages, some with a frozen layer, and a matrix that the first and last share."""
    torch.manual_seed(3)
    model = replicas.Uneven(LAYERS, layers=1).double()
    rows = torch.zeros(ROWS, replicas.FEATURES, dtype=torch.float64)
    return model, capture(model, mse_loss, (rows, rows))


def load(name: str) -> object:
    sys.path.insert(0, str(FOLDER))
    try:
        return import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def strategy_of(name: str) -> Strategy:
    return load(name).strategy()  # type: ignore[attr-defined, no-any-return]


NAMES = ("hanayo", "chimera", "breadth_first", "v_min", "v_half", "hsdp")
ELSEWHERE = ("asymmetric_stages", "encoder_beside_decoder")  # in test_unequal.py
HELPERS = ("train", "rows", "building_block", "two_branches")


@pytest.mark.parametrize("name", NAMES[:-1])
def test_its_schedule_is_legal(name: str) -> None:
    strategies.check(strategies.to_table(strategy_of(name)))


@one_of(2)
@pytest.mark.parametrize("name", every(3, NAMES))
def test_it_trains_as_plain_pytorch(name: str) -> None:
    model, captured = small()

    with using(captured):
        found = inspected(model, strategy_of(name))
        comparison = compare(found.job, found.example, found.captured, found.compiled, steps=2)

    assert comparison.dtype == "float64"
    assert comparison.agrees, comparison
    assert max(one.difference for one in comparison.parameters) < 1e-9


def inspected(model: nn.Module, strategy: Strategy) -> Inspected:
    feeds = replicas_of(one.devices for one in strategy if isinstance(one, Place)).feeds
    size = (ROWS * strategy.microbatches * len(feeds[0]), replicas.FEATURES)
    example = torch.randn(size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    with inspecting(), pytest.raises(Inspected) as found:
        Trainer(model, mse_loss, strategy, optimizer=replicas.ADAMW, example=example)
    return found.value


def test_chimera_is_that_of_the_paper() -> None:
    assert strategies.draw(strategies.to_table(strategy_of("chimera"))).splitlines() == [
        "PP rank 0  0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
        "PP rank 1  1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    ]


HANAYO = {  # rows of a public implementation of the paper, with as many microbatches as devices
    (2, 2): [
        "PP rank 0  0F0 0F1 3F0 4F0 3F1 4F1 7F0 7B0 7F1 7B1 4B0 3B0 4B1 3B1 0B0 0B1",
        "PP rank 1  1F0 2F0 1F1 2F1 5F0 6F0 5F1 6F1 6B0 5B0 6B1 5B1 2B0 1B0 2B1 1B1",
    ],
    (4, 1): [
        "PP rank 0  0F0 0F1 0F2 0F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 0B0 0B1 0B2 0B3",
        "PP rank 1  1F0 1F1 1F2 6F0 1F3 6F1 6B0 6F2 6B1 6F3 6B2 1B0 6B3 1B1 1B2 1B3",
        "PP rank 2  2F0 2F1 5F0 2F2 5F1 2F3 5F2 5B0 5F3 5B1 2B0 5B2 2B1 5B3 2B2 2B3",
        "PP rank 3  3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4B0 3B0 4B1 3B1 4B2 3B2 4B3 3B3",
    ],
}


@pytest.mark.parametrize(("pp", "waves"), HANAYO)
def test_hanayo_has_the_rows_of_a_public_implementation(pp: int, waves: int) -> None:
    table = strategies.to_table(load("hanayo").strategy(pp, waves, pp))

    assert strategies.draw(table).splitlines() == HANAYO[pp, waves]


def idle(strategy: Strategy, stages: int) -> int:
    """Percent of the step that devices are idle, where a backward takes as long as two forwards."""
    drawn = summary(dag_rows(compile_strategy(chain(stages), strategy).dag))
    return int(re.search(r"idle (\d+) %", drawn)[1])


@pytest.mark.parametrize("pp", [4, 6, 8])
def test_chimera_has_the_bubble_of_the_paper(pp: int) -> None:
    bubble = (pp - 2) / (3 * pp / 2 + pp - 2)  # with as many microbatches as stages

    assert idle(load("chimera").strategy(pp), pp) == round(100 * bubble)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_hanayo_idles_for_less_than_the_bubble_of_the_paper(
    pp: int, waves: int, times: int
) -> None:
    """With as many microbatches as devices, the paper has (2P - 2) / (3PW + P - 1) of the step."""
    count = times * pp
    table = strategies.to_table(load("hanayo").strategy(pp, waves, count))
    work = 6 * waves * count  # of each device: forwards and backwards of its stages
    bubble = (2 * pp - 2) / (3 * pp * waves + pp - 1)

    took = max(start + STEPS[one.phase] for one, start in start_times(table).items())

    assert took == work + 4 * (pp - 1)
    assert 1 - work / took <= bubble
    assert took < 6 * waves * (count + pp - 1)  # stages of 1F1B are 2W times as long


@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8])
def test_v_schedules_hold_a_third_and_half_of_the_activations_of_1f1b(pp: int) -> None:
    """1F1B holds the activations of pp stages, which are 2 * pp of these half as large."""
    least, half = (
        max(strategies.peaks(strategies.to_table(load(name).strategy(pp, 4 * pp))))
        for name in ("v_min", "v_half")
    )

    assert least <= 2 * pp / 3 + 3
    assert half <= pp + 2


def test_breadth_first_gathers_each_layer_twice() -> None:
    dag = compile_strategy(chain(LAYERS), strategy_of("breadth_first")).dag

    nodes = [node for node in dag.nodes.values() if isinstance(node, Collective)]
    gathers = [node for node in nodes if node.kind is Kind.ALL_GATHER]
    assert len(gathers) == 2 * LAYERS - LAYERS // 2  # the last stages turn without a gather


def test_each_has_at_most_25_lines() -> None:
    lines = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}

    assert sorted(lines) == sorted((*NAMES, *ELSEWHERE, *HELPERS))
    assert all(lines[name] <= 25 for name in (*NAMES, *ELSEWHERE))
    assert all(lines[name] <= 40 for name in HELPERS)
