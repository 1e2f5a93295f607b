"""What a pass allocates with a share of the experts, against a model that has only so many."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import annotate, capture
from piper.ir.model import Region
from piper.models.grouped import grouped_mm
from piper.names import BI, BW, B, F, Phase

EXPERTS, ROWS, WIDTH, HIDDEN = 8, 12, 4, 6


class SwiGLUs(nn.Module):
    """The weights of the first product are made in the region: they need memory of their own."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, WIDTH, 2 * HIDDEN))
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH))
        self.gain = nn.Parameter(torch.ones(experts, 1, 1))
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        with annotate("PP"):
            rows = self.before(rows)
        with annotate("EP"):
            gate, up = grouped_mm(rows, self.gate_up * self.gain, counts).chunk(2, dim=-1)
            rows = grouped_mm(functional.silu(gate) * up, self.down, counts)
        with annotate("PP"):
            return rows.square().mean()


@cache
def region(experts: int) -> Region:
    counts = torch.zeros(experts, dtype=torch.int64)
    counts[0] = ROWS
    found = capture(SwiGLUs(experts), None, (torch.randn(ROWS, WIDTH), counts))
    return found.model_with([("costly",)]).by_id["EP0"]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("phase", [F, B, BI, BW])
def test_a_share_needs_as_much_as_a_model_with_so_many_experts(
    phase: Phase, recomputed: bool
) -> None:
    of = (lambda one: one.recomputed["costly",]) if recomputed else (lambda one: one)
    whole = of(region(EXPERTS))

    assert whole.allocates(phase) == whole.workspace[phase]
    assert whole.allocates(phase, compiled=True) == whole.fused_workspace[phase]
    for ways in (2, 4):
        alone = of(region(EXPERTS // ways))
        assert whole.allocates(phase, ways) == alone.workspace[phase]
        assert whole.allocates(phase, ways, compiled=True) == alone.fused_workspace[phase]
        assert phase in (F, BI) or alone.workspace[phase] < whole.workspace[phase]
