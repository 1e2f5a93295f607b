"""Processes that were given different things are told so, before they train apart."""

from parity import compare_notes
from pool import run_on


def test_processes_that_agree_go_on() -> None:
    assert run_on(2, compare_notes, 0, 0) == ["fine", "fine"]


def test_other_initial_weights_are_refused() -> None:
    message = (
        "model: 0.weight starts with other values on device 1 than on device 0\n"
        "  fix: call torch.manual_seed(...) before the model is built, or load a checkpoint"
    )

    assert run_on(2, compare_notes, 1, 0) == [message, message]


def test_other_plans_are_refused() -> None:
    message = (
        "strategy: devices 0 and 1 compiled different plans\n"
        "  fix: let every process build the same model, strategy and example"
    )

    assert run_on(2, compare_notes, 0, 1) == [message, message]
