"""Layers that go through their tokens one by one, as Mamba without kernels of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divided_training import assert_trains_divided
from draws import every
from shared_capture import one_model
from torch import Tensor, nn
from torch.nn import functional

from piper import annotate
from piper.capture.graphs.division import divide
from piper.capture.graphs.division.search import plan
from piper.capture.graphs.division.search.space import Space

KNOWN = one_model()


class Scan(nn.Module):
    """A decay and an input for each token, read one after the other; all states are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.gate, self.out = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        decay, given = torch.sigmoid(self.pair(x)).chunk(2, -1)
        gate, state, found = self.gate(x), torch.zeros_like(x[:, 0]), []
        for token in range(x.shape[1]):
            state = torch.tanh(decay[:, token] * state + given[:, token])
            found.append(state.exp())
        return x + self.out(torch.stack(found, 1) * functional.silu(gate))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Scan() for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("L"):
            x = self.first(x)
        for layer in self.layers:
            with annotate("L"):
                x = layer(x)
        return x


@pytest.mark.parametrize("how", every(2, [{"tp": 2}, {"cp": 2}]))
def test_a_divided_scan_is_equal(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    spaces: list[Space] = []
    monkeypatch.setattr(
        divide,
        "search",
        lambda space, result: (spaces.append(space), plan.search(space, result))[1],
    )

    with KNOWN():
        assert_trains_divided(Model(), how)

    (space,) = spaces
    assert [len(group) for group in space.groups] == [2, 2]  # decays and inputs of all layers
    assert len(space.joined) == 2 * 7  # all states but the first of each layer
