"""What an encoder gives to all layers of a decoder is placed once, and the result is PyTorch's."""

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
from piper.capture.graphs.division.search import hubs

KNOWN = one_model()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.query, self.pair, self.out = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        key, value = self.pair(memory).chunk(2, -1)
        q, k, v = (
            t.unflatten(-1, (4, 2)).transpose(1, 2)
            for t in (self.query(self.norms[0](x)), key, value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Layer() for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("L"):
            memory, y = self.norm(torch.relu(self.encoder(x))), self.first(x)
        for layer in self.layers:
            with annotate("L"):
                y = layer(y, memory)
        return y


@pytest.mark.parametrize("how", every(2, [{"tp": 2}, {"cp": 2}], ["tp", "cp"]))
def test_a_divided_decoder_is_equal(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "APART", 10)  # these layers are short
    found: list[int] = []
    look = hubs.hubs_of
    monkeypatch.setattr(
        "piper.capture.graphs.division.search.space.hubs_of",
        lambda nodes: (found.append(len(look(nodes))), look(nodes))[1],
    )

    with KNOWN():
        assert_trains_divided(Translator(), how)

    assert found == [1]
