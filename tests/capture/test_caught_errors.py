"""A forward that catches errors of values is refused: a trace has no values, and so no errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import rehearse
from piper.errors import CaptureError

Forward = Callable[[nn.Linear, Tensor], Tensor]
MATRIX = torch.eye(3)


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.way = nn.Linear(6, 3), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.layer, x)


def jittered(layer: nn.Linear, x: Tensor) -> Tensor:
    kernel = layer.weight @ layer.weight.T - 3 * MATRIX
    try:
        factor = torch.linalg.cholesky(kernel)
    except RuntimeError:
        factor = torch.linalg.cholesky(kernel + 10 * MATRIX)
    return layer(x) @ factor


def inverted(layer: nn.Linear, x: Tensor) -> Tensor:
    try:
        return layer(x) @ torch.inverse(layer.weight[:, :3])
    except torch.linalg.LinAlgError:
        return layer(x) @ torch.linalg.pinv(layer.weight[:, :3])


def suppressed(layer: nn.Linear, x: Tensor) -> Tensor:
    out = layer(x)
    with suppress(Exception):
        out = out @ torch.linalg.inv(layer.weight[:, :3])
    return out


def helped(layer: nn.Linear, x: Tensor) -> Tensor:
    """The error comes from a function that is called."""

    def factor(kernel: Tensor) -> Tensor:
        return torch.linalg.cholesky(kernel)

    try:
        return layer(x) @ factor(layer.weight @ layer.weight.T)
    except:  # noqa: E722
        return layer(x)


def looked_up(layer: nn.Linear, x: Tensor) -> Tensor:
    places = (x.abs() * 100).long()[:, 0]
    try:
        return layer(x) + MATRIX[places]
    except (KeyError, IndexError):
        return layer(x)


@pytest.mark.parametrize(
    "forward",
    [jittered, inverted, suppressed, helped, looked_up],
    ids=lambda one: one.__name__,
)
def test_what_catches_errors_of_values_is_refused(forward: Forward) -> None:
    with pytest.raises(CaptureError, match=r"it catches an error of [\s\S]*cholesky_ex"):
        rehearse(Net(forward), F.mse_loss, None, [(torch.randn(8, 6), torch.randn(8, 3))])


def measured(layer: nn.Linear, x: Tensor) -> Tensor:
    try:
        rows = int((x > 0).sum())
    except Exception:
        rows = 3
    return layer(x) * rows


def decided(layer: nn.Linear, x: Tensor) -> Tensor:
    out = layer(x)
    with suppress(Exception):
        out = out * 2 if x.sum() > 0 else out
    return out


def listed(layer: nn.Linear, x: Tensor) -> Tensor:
    try:
        return layer(x) * max(x[:, 0].tolist())
    except:  # noqa: E722
        return layer(x)


def compared(layer: nn.Linear, x: Tensor) -> Tensor:
    try:
        return layer(x) * (2 if x.abs().max().item() > 1 else 1)
    except (ValueError, RuntimeError):
        return layer(x)


@pytest.mark.parametrize(
    "forward", [measured, decided, listed, compared], ids=lambda one: one.__name__
)
def test_what_only_a_trace_raises_is_not_swallowed(forward: Forward) -> None:
    """Else it would take another way than the forward does on numbers."""
    with pytest.raises(CaptureError, match="needs the value of a tensor"):
        rehearse(Net(forward), F.mse_loss, None, [(torch.randn(8, 6), torch.randn(8, 3))])


def of_modules(layer: nn.Linear, x: Tensor) -> Tensor:
    try:
        import flash_attention_that_nobody_has  # type: ignore[import-not-found] # noqa: F401
    except ImportError:
        return layer(x) @ torch.linalg.inv(MATRIX + x[:3, :3].abs())
    return layer(x)


def of_missing_keys(layer: nn.Linear, x: Tensor) -> Tensor:
    try:
        return layer(x) @ torch.linalg.inv(3 * MATRIX + x[:3, :3].abs().detach())
    except (KeyError, AttributeError):
        return layer(x)


def told_again(layer: nn.Linear, x: Tensor) -> Tensor:
    try:
        return layer(x) @ torch.linalg.inv(3 * MATRIX)
    except RuntimeError as error:
        raise ValueError("a singular matrix") from error


def with_parts(layer: nn.Linear, x: Tensor) -> Tensor:
    try:
        return layer(x[:, [0, 1, 2, 3, 4, 5]])
    except RuntimeError:
        return layer(x.T)


def made_in_a_try() -> Forward:
    try:

        def defined_there(layer: nn.Linear, x: Tensor) -> Tensor:
            return layer(x) @ torch.linalg.inv(3 * MATRIX)

        return defined_there
    except Exception:
        return with_parts


@one_of(2)
@pytest.mark.parametrize(
    "forward",
    [made_in_a_try(), of_modules, of_missing_keys, told_again, with_parts],
    ids=lambda one: one.__name__,
)
def test_what_catches_nothing_of_these_trains(forward: Forward) -> None:
    batch = (torch.randn(8, 6), torch.randn(8, 3))
    wanted = F.mse_loss(Net(forward)(batch[0]), batch[1])

    assert rehearse(Net(forward), F.mse_loss, None, [batch]).losses == pytest.approx(
        [wanted.item()]
    )
