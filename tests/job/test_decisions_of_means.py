"""What a loss decides by the mean of all rows, in models too large to be tried on numbers.

Random outputs are large. `(loss - 0.5).abs()` is a mean as long as all losses are larger.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.errors import InputError
from piper.job.loss import trial_size
from piper.strategies import gpipe

B = 0.5
k = torch.tensor(0.01)
Decision = Callable[[Tensor], Tensor]
DECISIONS: dict[str, Decision] = {
    "abs": lambda l: (l - B).abs() + B,
    "absolute": lambda l: torch.absolute(l - B),
    "pyabs": lambda l: abs(l - B),
    "l1": lambda l: F.l1_loss(l, k),
    "sl1": lambda l: F.smooth_l1_loss(l, k),
    "huber": lambda l: F.huber_loss(l, k),
    "leaky": lambda l: F.leaky_relu(l - B),
    "elu": lambda l: F.elu(l - B),
    "selu": lambda l: F.selu(l - B),
    "celu": lambda l: F.celu(l - B),
    "threshold": lambda l: F.threshold(l, B, B),
    "hardtanh": lambda l: F.hardtanh(l, 0, 1e9),
    "relu6": lambda l: F.relu6(l),
    "hardshrink": lambda l: F.hardshrink(l, B),
    "softshrink": lambda l: F.softshrink(l, B),
    "hardsigmoid": lambda l: F.hardsigmoid(l),
    "hardswish": lambda l: F.hardswish(l),
    "prelu": lambda l: F.prelu((l - B).view(1), k.view(1)).sum(),
    "rrelu": lambda l: F.rrelu(l - B, training=False),
    "remainder": lambda l: torch.remainder(l, 1000.0),
    "pymod": lambda l: l % 1000.0,
    "fmod": lambda l: torch.fmod(l, 1000.0),
    "frac": lambda l: l.frac(),
    "floor": lambda l: l + l.floor().detach(),
    "round": lambda l: l + l.round(),
    "ceil": lambda l: l.ceil() + l,
    "trunc": lambda l: l.trunc() + l,
    "marginrank": lambda l: F.margin_ranking_loss(l, k, -torch.ones((), dtype=l.dtype)),
    "hinge": lambda l: F.hinge_embedding_loss(l, -torch.ones((), dtype=l.dtype), margin=0.1) + l,
    "norm": lambda l: (l - B).norm(),
    "vnorm": lambda l: torch.linalg.vector_norm(l - B),
    "stackmax": lambda l: torch.stack([l, k]).max(),
    "stackamax": lambda l: torch.stack([l, k]).amax(),
    "stacksort": lambda l: torch.stack([l, k]).sort().values[1],
    "topk": lambda l: torch.stack([l, k]).topk(1).values.sum(),
    "logsumexp": lambda l: torch.stack([100 * l, k]).logsumexp(0),
    "softplus": lambda l: F.softplus(100 * l),
    "logaddexp": lambda l: torch.logaddexp(100 * l, k),
    "silu": lambda l: F.silu(100 * l),
    "gelu": lambda l: F.gelu(100 * l),
    "mish": lambda l: F.mish(100 * l),
    "maximum": lambda l: torch.maximum(l, k),
    "pymax": lambda l: torch.max(l, k),
    "where": lambda l: torch.where(l > B, l, 2 * l),
    "whereself": lambda l: torch.where(l > B, l, l.detach() * 0 + B),
    "median": lambda l: torch.stack([l, l * 2, k]).median(),
    "copysign": lambda l: torch.copysign(l, l - B),
    "sgn": lambda l: l * torch.sgn(l - B),
    "hypot": lambda l: torch.hypot(l - B, torch.zeros_like(l)),
    "dist": lambda l: torch.dist(l, k),
    "pdist": lambda l: F.pairwise_distance(l.view(1, 1), k.view(1, 1), eps=0.0).sum(),
    "sqrtsq": lambda l: (l - B).square().sqrt(),
    "pow": lambda l: ((l - B) ** 2) ** 0.5,
    "tanhlin": lambda l: l + F.tanh(100 * l),
    "sigm": lambda l: l + torch.sigmoid(100 * l),
    "erf": lambda l: l + torch.erf(100 * l),
    "logsig": lambda l: -F.logsigmoid(-100 * l),
    "logical_not": lambda l: l * torch.logical_not(l - B),
    "isclose": lambda l: l * (1 + torch.isclose(l, k)),
    "nan": lambda l: torch.nan_to_num(l),
    "clampmin": lambda l: l.clamp(min=B),
    "clip": lambda l: torch.clip(l, max=1e6),
    "cummax": lambda l: torch.stack([k, l]).cummax(0).values[1],
    "aminmax": lambda l: torch.aminmax(torch.stack([k, l]))[1],
    "bucket": lambda l: l * (1 + torch.bucketize(l.detach(), k.view(1))),
    "search": lambda l: l * (1 + torch.searchsorted(k.view(1), l.detach().view(1))).sum(),
    "kth": lambda l: torch.stack([k, l]).kthvalue(2)[0],
    "quantile": lambda l: torch.stack([k, l]).quantile(1.0),
    "hardmax": lambda l: (F.softmax(torch.stack([1e4 * l, k]), 0) * torch.stack([l, k])).sum(),
    "argmax": lambda l: l * (1 + torch.stack([l, k]).argmax()),
    "any": lambda l: l * (1 + torch.stack([l - B]).any()),
    "bce": lambda l: l + F.binary_cross_entropy_with_logits(1e3 * l, torch.ones_like(l)),
    "softmargin": lambda l: F.soft_margin_loss(-100 * l, torch.ones_like(l)),
    "relu_": lambda l: (l - B).relu_(),
    "clamp_": lambda l: (l * 1).clamp_(min=B),
    "masked_fill": lambda l: l.masked_fill(l < B, B),
    "maskmul": lambda l: l * (l > B),
    "index": lambda l: torch.stack([l * 2, l])[(l > B).long()],
    "int": lambda l: l * (1 + l.detach().long()),
    "fmax": lambda l: torch.fmax(l, k),
}
SMOOTH: dict[str, Decision] = {
    "itself": lambda l: l,
    "scaled": lambda l: 0.5 * l + 0.25 * l,
    "twice": lambda l: torch.stack([l, 2 * l]).sum(),
    "weighed": lambda l: (torch.stack([l, 2 * l]) * torch.tensor([0.3, 0.7])).mean(),
    "to and fro": lambda l: l.double().float(),
}


def trained(decide: Decision) -> None:
    torch.manual_seed(0)
    small, large = 0.05 * torch.randn(4, 4), 2 * torch.randn(4, 4)
    batch = torch.cat([small, large]), torch.zeros(8, 4)
    rehearse(
        nn.Linear(4, 4),
        lambda output, y: decide(F.mse_loss(output, y)),
        gpipe(pp=1, microbatches=2),
        [batch],
    )


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_size, "WHOLE", 0.0)  # as if models were large
    monkeypatch.setattr(trial_size, "MOST", 0.0)


@one_of(15)
@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_by_a_mean_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="loss"):
        trained(DECISIONS[name])


@one_of(2)
@pytest.mark.parametrize("name", SMOOTH)
def test_sums_and_multiples_of_means_are_means(name: str) -> None:
    trained(SMOOTH[name])
