"""Powers of norms are sums over rows; the norms themselves are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from draws import one_of
from loss_forms import PARTS, ROWS, Loss, difference, form_of
from torch import Tensor
from torch.nn import functional as F

from piper.capture.loss import meeting_rows
from piper.capture.trace.forward import loss_graph, trace

Norm = Callable[[Tensor], Tensor]
NORMS: dict[str, tuple[float, Norm]] = {
    "norm": (2, lambda x: x.norm()),
    "norm(2)": (2, lambda x: x.norm(2)),
    "fro": (2, lambda x: torch.norm(x, p="fro")),
    "vector": (2, torch.linalg.vector_norm),
    "linalg": (2, torch.linalg.norm),
    "matrix": (2, torch.linalg.matrix_norm),
    "of three": (3, lambda x: x.norm(3)),
    "of columns": (2, lambda x: x.norm(dim=0)),
    "of columns, kept": (2.5, lambda x: x.norm(2.5, dim=0, keepdim=True)),
    "both dimensions": (2, lambda x: torch.linalg.norm(x, dim=(0, 1))),
    "distance": (2, lambda x: torch.dist(x, torch.zeros_like(x))),
    "scaled": (2, lambda x: 3 * x.norm() / 2),
}
POWERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "pow": lambda n, p: n.pow(p),
    "**": lambda n, p: (-n) ** p if p == 2 else n**p,
    "product": lambda n, p: n * n if p == 2 else n.float_power(p),
    "square": lambda n, p: n.square() if p == 2 else n.pow(p),
}
ENDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "over rows": lambda s, x: s.sum() / len(x),
    "over a float": lambda s, x: 0.5 * s.sum() / float(len(x)),
    "over all": lambda s, x: (s / x.numel()).sum(),
    "sum": lambda s, x: s.sum(),
}
ORDERS_OF_NO_SUM: dict[str, Norm] = {
    "itself": lambda x: x.norm() / len(x),
    "another power": lambda x: x.norm() ** 3 / len(x),
    "largest": lambda x: x.norm(float("inf")).square() / len(x),
    "spectral": lambda x: torch.linalg.norm(x, 2) ** 2 / len(x),
    "nuclear": lambda x: torch.linalg.matrix_norm(x, "nuc") / len(x),
    "two": lambda x: x.norm() * (x + 1).norm() / len(x),
    "mean of roots": lambda x: x.norm(dim=0).mean() ** 2 / len(x),
    "scaled by rows": lambda x: (x.norm() / len(x)) ** 2,
    "divided": lambda x: x.sum() / x.norm() ** 2,
}


def of_difference(norm: Norm, power: Callable[..., Tensor], end: Callable[..., Tensor]) -> Loss:
    return lambda o, y: end(power(norm(o["x"] - y["y"])), o["x"])


def assert_proved(case: int, name: str, power: str, end: str) -> None:
    order, norm = NORMS[name]
    parts = (PARTS, ROWS * PARTS)[case % 2]
    loss = of_difference(norm, lambda found: POWERS[power](found, order), ENDS[end])
    form = form_of(loss, parts)

    assert form.kind == ("sum" if end == "sum" else "mean"), (name, power, end)
    assert difference(loss, form, 1 + case, parts) < 1e-12, (name, power, end)


def test_powers_of_norms_are_sums_over_rows() -> None:
    for case, name in enumerate(NORMS):
        power, end = [*POWERS][case % len(POWERS)], [*ENDS][(case // 2) % len(ENDS)]
        assert_proved(case, name, power, end)


@pytest.mark.soak
def test_all_powers_of_all_norms_are_sums_over_rows() -> None:
    for case, names in enumerate(product(NORMS, POWERS, ENDS)):
        assert_proved(case, *names)


@one_of(3)
@pytest.mark.parametrize("name", ORDERS_OF_NO_SUM)
def test_what_is_no_sum_is_not_proved(name: str) -> None:
    for parts in (PARTS, ROWS * PARTS):
        loss = ORDERS_OF_NO_SUM[name]

        assert form_of(lambda o, y, f=loss: f(o["x"] - y["y"]), parts).kind is None


def test_a_norm_of_each_row_is_its_own() -> None:
    form = form_of(
        lambda o, y: torch.linalg.matrix_norm(o["tokens"]).mean() + o["x"].norm(3, 1).mean()
    )

    assert form.kind == "mean"


class Model(torch.nn.Module):
    def __init__(self, function: Norm) -> None:
        super().__init__()
        self.first, self.function = torch.nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.first(x))


MEETING: dict[str, Norm] = {
    "normalised": lambda x: F.normalize(x, dim=0).square().mean(),
    "divided": lambda x: (x / x.norm(dim=0)).square().mean(),
    "divided by all": lambda x: (x / x.norm()).square().mean(),
    "columns": lambda x: x.norm(dim=0).mean(),
}


@pytest.mark.parametrize("name", MEETING)
def test_rows_that_meet_in_a_norm_are_known_by_its_line(name: str) -> None:
    def line(function: Norm) -> str:
        model = Model(function)
        again = partial(loss_graph, model, device="cpu", precision=None)
        return meeting_rows(trace(model, None, (torch.randn(4, 8),), "cpu", None), again)

    assert "norm" in line(MEETING[name])
    assert line(lambda x: (x.norm(dim=0) ** 2).sum() / len(x)) == ""
