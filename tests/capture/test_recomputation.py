"""What a region keeps, reads and repeats when its backward recomputes the forward."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from capture.interpreter import assert_parity
from torch import Tensor, nn

from piper.capture import Captured, annotate, capture
from piper.capture.graphs.recomputation import MAY_DIFFER
from piper.ir.model import Region
from piper.names import BI, BW, B, Phase

aten = torch.ops.aten
Body = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """Two regions, of which the second is given."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.a, self.b = (nn.Linear(8, 8) for _ in range(3))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.first(x).tanh()
        with annotate("PP"):
            return self.body(self, x).mean()


def captured(body: Body) -> tuple[Captured, Region]:
    """After comparing it with autograd, whole and split, with and without recomputation."""
    model, x = Model(body), torch.randn(4, 8)
    found = capture(model, None, (x,))
    assert_parity(found, model, None, (x,))
    region = found.model.by_id["PP1"].recomputed
    assert region is not None
    return found, region


def operators(found: Captured, region: Region, phase: Phase) -> Counter:
    graph = found.kernels.graphs[region.code][phase].graph
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    return Counter(getattr(target, "overloadpacket", target) for target in calls)


def layers(self: nn.Module, x: Tensor) -> Tensor:
    return torch.sin(self.b(torch.tanh(self.a(x))))


def test_the_forward_keeps_its_inputs_and_nothing_else() -> None:
    found, region = captured(layers)

    assert found.model.by_id["PP1"].saved
    assert region.saved == ()
    assert region.backward_inputs == (0,)
    assert region.recomputes and not found.model.by_id["PP1"].recomputes


def gated(self: nn.Module, x: Tensor) -> Tensor:
    """Only the weight gradient reads the product, and BI reads both its factors."""
    return self.b(torch.tanh(self.a(x)) * torch.sin(self.a(x)))


@pytest.mark.parametrize("body", [layers, gated])
def test_halves_repeat_the_forward_once_together(body: Body) -> None:
    found, region = captured(body)
    whole, first, second = (operators(found, region, phase) for phase in (B, BI, BW))

    assert whole[aten.tanh] == first[aten.tanh] == 1
    assert second[aten.tanh] == second[aten.sin] == second[aten.mul] == 0
    assert region.flops[BI] + region.flops[BW] == region.flops[B]
    assert region.carry == found.model.by_id["PP1"].carry


def test_without_input_gradients_the_second_half_repeats_the_forward() -> None:
    """BI has nothing to do: what it recomputed would only wait for BW."""
    found, _ = captured(layers)
    region = found.model.by_id["PP0"].recomputed
    assert region is not None

    assert found.model.by_id["PP0"].carry
    assert region.carry == ()
    assert operators(found, region, BI)[aten.tanh] == 0
    assert operators(found, region, BW)[aten.tanh] == 1


def test_a_region_without_backward_is_not_described_twice() -> None:
    model = Model(layers)
    model.first.requires_grad_(False)

    found = capture(model, None, (torch.randn(4, 8),))

    assert not found.model.by_id["PP0"].has_backward
    assert found.model.by_id["PP0"].recomputed is None


def top(self: nn.Module, x: Tensor) -> Tensor:
    score, chosen = torch.tanh(self.a(x)).topk(3)
    return torch.sin(self.b(x)).gather(1, chosen) * score


def ordered(self: nn.Module, x: Tensor) -> Tensor:
    return self.b(torch.sin(torch.tanh(self.a(x)).sort(dim=1).values))


def added(self: nn.Module, x: Tensor) -> Tensor:
    rows = torch.tensor([0, 1, 1, 0])
    return self.b(torch.sin(torch.zeros_like(x).index_add(0, rows, torch.tanh(self.a(x)))))


def summed(self: nn.Module, x: Tensor) -> Tensor:
    return self.b(torch.sin(torch.tanh(self.a(x)).cumsum(0)))


def branched(self: nn.Module, x: Tensor) -> Tensor:
    y = torch.tanh(self.a(x))
    return torch.sin(torch.cond(y.sum() > 0, lambda y: y.sort(1).values * 2, torch.neg, (y,)))


@pytest.mark.parametrize("body", [top, ordered, added, summed, branched])
def test_what_may_differ_when_it_is_repeated_is_kept(body: Body) -> None:
    found, region = captured(body)

    assert region.saved
    assert operators(found, region, B)[aten.tanh] == 1, "what comes before it is recomputed"
    for phase in (B, BI, BW):
        own = operators(found, found.model.by_id["PP1"], phase)  # of the gradients: these run once
        again = operators(found, region, phase) - own
        assert {*MAY_DIFFER, torch.ops.higher_order.cond}.isdisjoint(again)
