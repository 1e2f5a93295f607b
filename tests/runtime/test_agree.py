"""Processes that were given different things are told so, before they train apart."""

import torch
from pool import run_on
from torch import nn

from piper import Place, Split, where
from piper.capture import capture
from piper.compiler import compile_strategy
from piper.errors import PiperError
from piper.runtime.agree import refuse_disagreement


def build(rank: int, seed: int, parts: int) -> str:
    """What a device says to the others' weights (other seeds) and plans (other parts)."""
    torch.manual_seed(seed * rank)
    model = nn.Sequential(nn.Linear(4, 4))
    strategy = [Place(where(), [0]), Split("MB", 2 + parts * rank)]
    example = (torch.zeros(6, 4), torch.zeros(6, 4))
    try:
        captured = capture(model, nn.functional.mse_loss, example)
        refuse_disagreement(compile_strategy(captured.model, strategy).plans, model)
    except PiperError as error:
        return str(error)
    return "fine"


def test_processes_that_agree_go_on() -> None:
    assert run_on(2, build, 0, 0) == ["fine", "fine"]


def test_other_initial_weights_are_refused() -> None:
    message = (
        "model: 0.weight starts with other values on device 1 than on device 0\n"
        "  fix: call torch.manual_seed(...) before the model is built, or load a checkpoint"
    )

    assert run_on(2, build, 1, 0) == [message, message]


def test_other_plans_are_refused() -> None:
    message = (
        "strategy: devices 0 and 1 compiled different plans\n"
        "  fix: let every process build the same model, strategy and example"
    )

    assert run_on(2, build, 0, 1) == [message, message]
