"""Random legal strategies, run for real: all devices as threads, against plain autograd."""

from __future__ import annotations

import random
from functools import cache, partial

import torch
from draws import drawn, draws
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import plain_losses
from shared_capture import using
from torch import nn

from piper import Order, Place, Split, Strategy, annotate, rehearse, where
from piper.capture import Captured, capture

STAGES, ROWS = 4, 12
SGD = partial(torch.optim.SGD, lr=0.1)


class Net(nn.Module):
    """Four regions with a skip edge, a tied parameter, a frozen one and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(STAGES))
        self.layers[3].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for layer in self.layers:
            with annotate("PP"):
                x = torch.tanh(layer(x)) + (seen[0] if len(seen) == 2 else 0)
                seen.append(x)
        return x


def make() -> Net:
    torch.manual_seed(3)
    return Net()


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@cache
def found(size: int) -> Captured:
    return capture(make(), loss_fn, (torch.zeros(size, 6), torch.zeros(size, 6)))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, ROWS, 6, generator=generator)
    return [(draw(), draw()) for _ in range(3)]


@cache
def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The whole batch at once, without Piper."""
    model = make()
    optimizer = SGD(model.parameters())
    losses = plain_losses(optimizer, batches(), lambda x, y: loss_fn(model(x), y))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def a_legal_order(parts: int, split: set[tuple[int, int]], chance: random.Random) -> list[str]:
    """All passes in a random order that respects the dataflow."""
    needs: dict[str, list[str]] = {}
    for part in range(parts):
        for stage in range(STAGES):
            needs[f"{stage}F{part}"] = [f"{stage - 1}F{part}"] if stage else []
            below = f"{stage + 1}F{part}" if stage + 1 < STAGES else None
            name = "BI" if (stage, part) in split else "B"
            later = "BI" if (stage + 1, part) in split else "B"
            wait = [f"{stage + 1}{later}{part}"] if below else [f"{stage}F{part}"]
            needs[f"{stage}{name}{part}"] = wait
            if name == "BI":
                needs[f"{stage}BW{part}"] = [f"{stage}BI{part}"]
    done: list[str] = []
    while needs:
        ready = [name for name, wait in needs.items() if all(w not in needs for w in wait)]
        done.append(chance.choice(ready))
        del needs[done[-1]]
    return done


def as_filter(name: str):
    digits = name.lstrip("0123456789")
    stage, phase = name[: len(name) - len(digits)], digits.rstrip("0123456789")
    return where(PP=int(stage), MB=int(digits[len(phase) :]), PASS=phase)


@st.composite
def legal_strategies(draw: st.DrawFn) -> Strategy:
    devices = draw(st.lists(st.integers(0, 3), min_size=STAGES, max_size=STAGES))
    number = {device: k for k, device in enumerate(dict.fromkeys(devices))}
    parts = draw(st.sampled_from([1, 2, 3, 4, 6]))
    halves = draw(st.sets(st.tuples(st.integers(0, STAGES - 1), st.integers(0, parts - 1))))
    places = [Place(where(PP=s), [number[d]]) for s, d in enumerate(devices)]
    if draw(st.booleans()) and not halves:
        return Strategy([*places, Split("MB", parts)])
    order = a_legal_order(parts, halves, random.Random(draw(st.integers())))
    return Strategy([*places, Split("MB", parts), Order([as_filter(name) for name in order])])


@drawn
@settings(max_examples=draws(5, 160), deadline=None)
@given(legal_strategies())
def test_any_legal_strategy_trains_as_plain_pytorch(strategy: Strategy) -> None:
    losses, parameters = reference()

    with using(found(ROWS // strategy.microbatches)):
        result = rehearse(make(), loss_fn, strategy, batches(), optimizer=SGD)

    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(losses), rtol=1e-6, atol=0)
    assert set(result.parameters) == set(parameters)
    for name, tensor in parameters.items():
        torch.testing.assert_close(result.parameters[name], tensor, rtol=1e-5, atol=1e-7)
