"""Target networks (BYOL, MoCo): buffers that a forward updates from parameters, on replicas."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.errors import PassError
from piper.strategies import one_f_one_b

SGD = partial(torch.optim.SGD, lr=0.2)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


class Pair(nn.Module):
    """`kind` says by how much the target follows; `after`: only after it is used."""

    def __init__(self, kind: str = "fixed", after: bool = False) -> None:
        super().__init__()
        self.kind, self.after = kind, after
        self.online, self.target = network(), network()
        self.predictor = nn.Linear(6, 6).double()
        for module in self.target.modules():
            for name in list(module._parameters):
                module.register_buffer(name, module._parameters.pop(name).detach())
        self.register_buffer("rate", torch.tensor(0.3, dtype=torch.float64))

    def share(self, x: Tensor) -> Tensor | float:
        if self.kind == "counted":
            self.rate.mul_(0.8)
        if self.kind == "by data":
            self.rate.copy_(self.rate.lerp(x.mean().sigmoid(), 0.5))
        return {"drawn": torch.rand([]).double(), "by rows": 1 / len(x)}.get(self.kind, self.rate)

    @torch.no_grad()
    def follow(self, x: Tensor) -> None:
        share = self.share(x)
        for mine, its in zip(self.online.parameters(), self.target.buffers(), strict=True):
            its.copy_(its + share * (mine - its))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        if not self.after:
            self.follow(first)
        with torch.no_grad():
            wanted = self.target(second)
        found = self.predictor(self.online(first))
        loss = (2 - 2 * functional.cosine_similarity(found, wanted, dim=-1)).mean()
        if self.after:
            self.follow(first)
        return loss


def model(kind: str = "fixed", after: bool = False) -> Pair:
    torch.manual_seed(0)
    return Pair(kind, after)


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(2, 8, 6, generator=draw, dtype=torch.float64))  # type: ignore[misc]
        for _ in range(4)
    ]


KINDS = ("fixed", "counted")
REPLICAS = {
    "2": one_f_one_b(pp=1, dp=2, microbatches=1),
    "2, zero 1": one_f_one_b(pp=1, dp=2, zero=1, microbatches=1),
    "2, zero 3": one_f_one_b(pp=1, dp=2, zero=3, microbatches=1),
    "4, zero 2": one_f_one_b(pp=1, dp=4, zero=2, microbatches=1),
    "2 x 2": one_f_one_b(pp=2, dp=2, microbatches=1),
}


WAYS = [(name, after, kind) for name in REPLICAS for after in (False, True) for kind in KINDS]


@one_of(3)
@pytest.mark.parametrize(("name", "after", "kind"), every(3, WAYS))
def test_targets_follow_as_in_plain_pytorch(name: str, after: bool, kind: str) -> None:
    plain = model(kind, after)
    optimizer, losses = SGD(plain.parameters()), []
    for batch in batches():
        optimizer.zero_grad()
        loss = plain(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    result = piper.rehearse(model(kind, after), None, REPLICAS[name], batches(), optimizer=SGD)

    assert list(result.losses) == pytest.approx(losses, rel=1e-12)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(result.parameters[name], tensor, rtol=1e-12, atol=0)
    moved = model().target.state_dict()
    assert not any(torch.equal(one, moved[key]) for key, one in plain.target.state_dict().items())


@one_of(2)
@pytest.mark.parametrize(
    ("kind", "after"), every(2, product(["by data", "drawn", "by rows"], [False, True]))
)
def test_targets_that_replicas_would_not_agree_on_are_refused(kind: str, after: bool) -> None:
    with pytest.raises(PassError, match="replicas would compute with different values"):
        piper.rehearse(
            copy.deepcopy(model(kind, after)), None, REPLICAS["2"], batches(), reduction="mean"
        )


def test_microbatches_of_replicas_would_move_a_target_several_times() -> None:
    with pytest.raises(PassError, match="in each microbatch of replicas"):
        strategy = one_f_one_b(pp=1, dp=2, microbatches=2)
        piper.rehearse(model(), None, strategy, batches(), optimizer=SGD)
