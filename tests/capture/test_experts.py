"""A mixture of experts: an operator of the user's own, in a region inside a stage."""

import torch
from capture.grouped import grouped
from capture.interpreter import assert_parity
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import annotate, capture


class Experts(nn.Module):
    def __init__(self, dim: int = 8, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen, self.experts = chosen, experts
        self.router = nn.Linear(dim, experts, bias=False)
        self.weight = nn.Parameter(torch.randn(experts, dim, dim) / dim)

    def forward(self, x: Tensor) -> Tensor:
        score, expert = self.router(x).softmax(-1).topk(self.chosen)
        expert = expert.flatten()
        order = expert.argsort(stable=True)
        counts = functional.one_hot(expert, self.experts).sum(0)
        rows = x[order // self.chosen]
        with annotate("EP"):
            rows = grouped(rows, self.weight, counts).tanh()
        rows = torch.zeros_like(rows).index_copy(0, order, rows)
        return x + (rows.view(-1, self.chosen, x.shape[1]) * score.unsqueeze(-1)).sum(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            with annotate("PP"):
                x = layer(x)
        return x.square().mean()


def test_experts_nest_in_stages() -> None:
    model = Net()
    captured = capture(model, None, (torch.randn(6, 8),))

    ids = [region.id for region in captured.model.regions]
    assert ids == ["PP0", "PP0.EP0", "PP0#1", "PP1", "PP1.EP1", "PP1#1"]
    codes = {region.id: region.code for region in captured.model.regions}
    assert codes["PP0.EP0"] == codes["PP1.EP1"]
    assert [b for b in captured.model.buckets if "EP" in b] == ["PP0.EP0", "PP1.EP1"]
    for seed in range(3):
        torch.manual_seed(seed)
        # Three uses of one value in two regions: their gradients are added in another order.
        assert_parity(captured, model, None, (torch.randn(6, 8),), exact=False)
