"""Strategies of the literature: their schedules are legal, and train as plain PyTorch."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import import_module
from math import ceil
from pathlib import Path

import pytest
import replicas
import torch
from draws import every
from shared_capture import using
from synthetic import chain
from torch import nn
from torch.nn.functional import mse_loss

from piper import Place, Strategy, Trainer, strategies
from piper.capture import Captured, capture
from piper.ir.by_device.schedule_rows import STEPS, dag_rows
from piper.ir.nodes import Collective, Kind
from piper.ir.placement.replicas import replicas as replicas_of
from piper.job.compile.compiler import compile_strategy
from piper.job.inspection import Inspected, inspecting
from piper.job.numerics import compare
from piper.strategies.timing import start_times, step_length
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
    module, _, variant = name.partition(" ")
    found = load(module)
    return found.strategy(*([getattr(found, variant)] if variant else []))


NAMES = ("hanayo", "chimera", "breadth_first", "v_schedules v_min", "v_schedules v_half", "hsdp")


@pytest.mark.parametrize("name", NAMES[:-1])
def test_its_schedule_is_legal(name: str) -> None:
    strategies.check(strategies.to_table(strategy_of(name)))


@pytest.mark.parametrize("name", every(2, NAMES))
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


def test_hanayo_and_chimera_are_those_of_the_papers() -> None:
    hanayo, chimera = (strategies.to_table(strategy_of(name)) for name in ("hanayo", "chimera"))

    assert strategies.draw(chimera).splitlines() == [
        "PP rank 0  0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
        "PP rank 1  1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    ]
    for devices in (2, 3, 4):  # one wave on half of the devices: the paper derives it from Chimera
        wave = load("hanayo").strategy(devices, waves=1, microbatches=devices)
        assert strategies.to_table(wave) == strategies.to_table(
            load("chimera").strategy(2 * devices)
        )
    stages = [[a.stage for slot in row for a in slot] for row in hanayo.rows]
    assert [sorted(set(row)) for row in stages] == [[0, 3, 4, 7], [1, 2, 5, 6]]


def idle(strategy: Strategy, stages: int) -> int:
    """Percent of the step that devices are idle, where a backward takes as long as two forwards."""
    drawn = summary(dag_rows(compile_strategy(chain(stages), strategy).dag))
    return int(re.search(r"idle (\d+) %", drawn)[1])


@pytest.mark.parametrize("pp", [4, 6, 8])
def test_chimera_has_the_bubble_of_the_paper(pp: int) -> None:
    bubble = (pp - 2) / (3 * pp / 2 + pp - 2)  # with as many microbatches as stages

    assert idle(load("chimera").strategy(pp), pp) == round(100 * bubble)


@pytest.mark.parametrize(("pp", "waves"), [(2, 1), (2, 4), (4, 1), (4, 2), (4, 4), (8, 2)])
def test_hanayo_has_at_most_the_bubble_of_the_paper(pp: int, waves: int) -> None:
    """With as many microbatches as devices: (2P - 2) / (3PW + P - 1), up to a time step."""
    bubble = (2 * pp - 2) / (3 * pp * waves + pp - 1)
    table = strategies.to_table(load("hanayo").strategy(pp, waves, microbatches=pp))

    starts = start_times(table)

    took = max(start + STEPS[action.phase] for action, start in starts.items())
    work = 3 * 2 * waves * pp  # of each device: forwards and backwards of its stages
    assert sum(STEPS[action.phase] for action in starts) == pp * work
    assert took <= ceil(work / (1 - bubble))
    assert took < waves * 2 * 3 * (2 * pp - 1)  # of 1F1B with as many microbatches


@pytest.mark.parametrize(("pp", "waves", "times"), [(2, 2, 3), (2, 4, 4), (4, 1, 3), (4, 2, 4)])
def test_hanayo_is_faster_than_1f1b_with_more_microbatches(pp: int, waves: int, times: int) -> None:
    """One with a limit of 2P microbatches in flight is not: 232 against 228 time steps for P=4."""
    count = times * pp

    table = strategies.to_table(load("hanayo").strategy(pp, waves, count))

    assert step_length(table) < 6 * waves * (count + pp - 1)  # stages of 1F1B are 2W times as long


@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8])
def test_v_schedules_hold_a_third_and_half_of_the_activations_of_1f1b(pp: int) -> None:
    """1F1B holds the activations of pp stages, which are 2 * pp of these half as large."""
    module = load("v_schedules")
    least, half = (
        max(strategies.peaks(strategies.to_table(module.strategy(times, pp, 4 * pp))))
        for times in (module.v_min, module.v_half)
    )

    assert least <= 2 * pp / 3 + 3
    assert half <= pp + 2


def test_breadth_first_gathers_each_layer_twice() -> None:
    dag = compile_strategy(chain(LAYERS), strategy_of("breadth_first")).dag

    nodes = [node for node in dag.nodes.values() if isinstance(node, Collective)]
    gathers = [node for node in nodes if node.kind is Kind.ALL_GATHER]
    assert len(gathers) == 2 * LAYERS - LAYERS // 2  # the last stages turn without a gather


def test_each_fits_on_a_page() -> None:
    for path in FOLDER.glob("*.py"):
        assert len(path.read_text().splitlines()) < 80, path
