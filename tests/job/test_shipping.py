"""One process captures and compiles; every other one gets its own part of it, or the same error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sent
import torch
from pool import run_on
from replicas import captured
from torch import nn

from piper.job.compile.assignment import (
    assigned,
    assignments,
    common_from_json,
    common_json,
    role_from_json,
    role_json,
)
from piper.job.compile.compiler import compile_strategy
from piper.job.programs.rehearsal import rehearse
from piper.names import F
from piper.plan.instructions import Run
from piper.strategies import BUILDERS


def test_only_the_first_process_captures_and_compiles() -> None:
    """Two kinds of batches, dropout with numbers of its own."""
    (losses, *first), (same, *second) = run_on(2, sent.train)

    whole = rehearse(
        sent.Net(nn.Dropout(0.5)), nn.functional.mse_loss, [*sent.TWO, sent.Split("MB", 2)],
        sent.data(), optimizer=sent.SGD,
    )  # fmt: skip
    assert losses == same
    torch.testing.assert_close(losses[:3], list(whole.losses), rtol=1e-12, atol=0)
    assert first == [["PP0"], ["PP0"], []]
    assert second[:2] == [["PP1"], ["PP1"]]
    phases = [name.split(" ")[1] for name in second[2]]
    assert sorted(phases) == ["B", "B", "F", "F"]  # of two kinds of batches


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("unplaced", "StrategyError", "or place regions on the other devices, too"),
        ("world", "StrategyError", "it uses devices [0], but the run has 2 processes"),
        ("no device", "PassError", "has no device"),
        ("uneven", "InputError", "it has 1 row, too few for 2 microbatches"),
    ],
)
def test_all_processes_end_with_the_error_of_the_first(case: str, kind: str, text: str) -> None:
    first, second = run_on(2, sent.refused, case)

    assert first == second
    assert first[0] == kind
    assert text in first[1]


def test_an_error_that_only_the_script_knows_is_told_by_its_name() -> None:
    first, second = run_on(2, sent.refused, "odd")

    assert first == ("Odd", "not today")
    assert second == ("RuntimeError", "Odd: not today")


@pytest.mark.parametrize("devices", [(0, 1), (1, 0)])
def test_a_kernel_is_sent_once(devices: tuple[int, int]) -> None:
    """Tuning compiles again: what changes is a plan. Either device may stand for both."""
    strategy = BUILDERS["1f1b"](pp=1, microbatches=2, dp=2, ep=2, zero=2, devices=devices)

    first, second = run_on(2, sent.tune, strategy.to_json())

    assert len(first) == 2 and first[0] > 0 and first[1] == 0
    assert second == first


@pytest.mark.parametrize(("name", "options"), [("dualpipev", {"ep": 2, "zero": 3}), ("zb-h1", {})])
def test_an_assignment_is_text_on_the_way(name: str, options: dict[str, int]) -> None:
    strategy = BUILDERS[name](pp=2, microbatches=4, dp=2, **options)
    stages = 4 if name == "dualpipev" else 2
    _, _, found = captured("moe spread", stages, 1)
    compiled = compile_strategy(found.model, strategy.directives, clip=True, by_role=True)

    mine = list(assignments(found, compiled))

    for one in mine:
        common = common_from_json(common_json(one.common))
        assert assigned(common, role_from_json(role_json(one.part)), one.plan.device) == one
        runs = {i.region for i in one.plan.instructions if isinstance(i, Run)}
        assert set(one.part.regions) == runs
        assert set(one.part.contents) == {state.bucket for state in one.plan.states}
    assert sum(len(one.reported_states) for one in mine) >= len(found.model.buckets)


def test_the_dropouts_of_regions_are_text_on_the_way() -> None:
    _, _, found = captured("moe spread", 2, 1)
    strategy = BUILDERS["1f1b"](pp=2, microbatches=4, dp=2)
    one = next(assignments(found, compile_strategy(found.model, strategy.directives))).part
    codes = {name: replace(code, dropout=7, random=((F, 2),)) for name, code in one.regions.items()}
    random = replace(one, regions=codes)

    assert role_from_json(role_json(random)) == random


def test_after_a_step_that_failed_there_is_no_other() -> None:
    """What it had sent could be taken for what the next one sends; a new Trainer has its own."""
    told = "trainer: a step failed, and its messages are still in flight\n  fix: make a new Trainer"

    for first, said, losses in run_on(2, sent.after_a_failure):
        assert said == told
        assert losses[0] == first
        assert losses[0] > losses[-1]
