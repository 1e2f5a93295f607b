"""The user's model waits in host memory. Here the "device" is host memory too."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from piper.job.loop.waiting_model import WaitingModel

HERE = "cpu"


class Net(nn.Module):
    """Two parameters in one memory, a transposed one, a buffer, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.arange(12.0)
        self.first, self.second = nn.Parameter(both[:6].view(2, 3)), nn.Parameter(both[6:])
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.tied = self.first
        self.register_buffer("seen", torch.ones(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied @ x + self.second[:2] + self.turned @ x


def addresses(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


def waiting() -> tuple[Net, dict[str, torch.Tensor], list[int], WaitingModel]:
    model = Net()
    values, before = copy.deepcopy(model.state_dict()), addresses(model)
    return model, values, before, WaitingModel(model, HERE)


def assert_values(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    for name, value in values.items():
        assert torch.equal(found[name], value) and found[name].stride() == value.stride()


def test_all_memory_of_the_device_is_left() -> None:
    model, values, before, _ = waiting()

    assert set(addresses(model)).isdisjoint(before)
    assert_values(model, values)
    assert model.tied is model.first
    assert model.second.untyped_storage()._cdata == model.first.untyped_storage()._cdata


@pytest.mark.parametrize("how", ["called", "loaded", "closed"])
def test_it_returns_once(how: str) -> None:
    model, values, _, wait = waiting()
    away = addresses(model)

    if how == "called":
        assert torch.isfinite(model(torch.ones(3))).all()
    elif how == "loaded":
        model.load_state_dict(values)
    else:
        wait.close()

    back = addresses(model)
    assert set(back).isdisjoint(away)
    assert_values(model, values)
    model(torch.ones(3))
    wait.close()
    assert addresses(model) == back


def test_a_copy_of_a_waiting_model_moves_nothing() -> None:
    model, values, _, _ = waiting()
    away = addresses(model)

    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.ones(3))
        assert_values(other, values)
    assert addresses(model) == away


def test_a_model_elsewhere_stays_where_it_is() -> None:
    with torch.device("meta"):
        model = Net()

    wait = WaitingModel(model, HERE)

    assert not wait.homes and not model._forward_pre_hooks
    assert all(tensor.is_meta for tensor in model.parameters())


def test_versions_and_gradients_survive() -> None:
    model = Net()
    model(torch.ones(3)).sum().backward()
    grads = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    versions = [parameter._version for parameter in model.parameters()]

    wait = WaitingModel(model, HERE)
    wait.close()

    assert [parameter._version for parameter in model.parameters()] == versions
    kept = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, kept, grads))
