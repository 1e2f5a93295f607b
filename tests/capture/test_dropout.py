"""Dropout is the same for the same samples, whatever the number of microbatches."""

import math
from functools import partial
from itertools import count

import pytest
import torch
from capture.interpreter import Interpreter, assert_parity, state
from draws import one_of
from small_models import squared_error
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from piper.capture import annotate, capture, dropout_mask


def mask(seed: int, microbatch: int, operation: int, *shape: int, p: float = 0.5) -> Tensor:
    return dropout_mask(torch.tensor([seed, microbatch, 1]), operation, shape, p)


def signs(*args: int) -> Tensor:
    return mask(*args).double().flatten() * 2 - 1


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p: float) -> None:
    dropped = 1 - mask(1, 0, 3, 64, 4096, p=p).double().mean()

    assert abs(dropped - p) < 4 * math.sqrt(p * (1 - p) / (64 * 4096))


def test_masks_of_seeds_operations_and_microbatches_are_unrelated() -> None:
    masks = [
        signs(seed, microbatch, operation, 32, 1024)
        for seed in (0, 1, 2**40)
        for microbatch in (0, 1)
        for operation in (0, 1, 2)
    ]

    related = torch.corrcoef(torch.stack(masks)).fill_diagonal_(0).abs().max()

    assert related < 5 / math.sqrt(32 * 1024)


def test_rows_and_neighbours_in_a_row_are_unrelated() -> None:
    signed = signs(7, 0, 0, 64, 4096).view(64, 4096)

    rows = torch.corrcoef(signed).fill_diagonal_(0).abs().max()
    lags = [(signed[:, lag:] * signed[:, :-lag]).mean().abs() for lag in (1, 2, 3, 16, 256, 1024)]

    assert rows < 5 / math.sqrt(4096)
    assert max(lags) < 5 / math.sqrt(64 * 3072)


def test_microbatches_have_the_masks_of_the_whole_batch() -> None:
    whole = mask(7, 0, 2, 8, 5, 3)

    parts = [mask(7, microbatch, 2, 2, 5, 3) for microbatch in range(4)]

    assert torch.equal(torch.cat(parts), whole)


class Net(nn.Module):
    """Dropouts in several regions; `drop` is what an independent reference replaces."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop = partial(functional.dropout, inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = self.drop(self.drop(layer(x), 0.25).tanh(), 0.5)
        return x


def reference(seed: int, microbatch: int) -> Net:
    """A dropout written down by hand, on masks from the documented function."""
    numbers = count()

    def drop(x: Tensor, p: float) -> Tensor:
        return x * mask(seed, microbatch, next(numbers), *x.shape, p=p) * (1 / (1 - p))

    model = Net()
    model.drop = drop
    return model


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_uses_the_documented_masks(inplace: bool) -> None:
    batch = torch.randn(4, 8), torch.randn(4, 8)
    model = Net(inplace)
    captured = capture(model, squared_error, batch)

    for split in (False, True):
        plain = reference(seed=11, microbatch=3)
        plain.load_state_dict(model.state_dict())
        step = Interpreter(captured, state(model), split=split, random=(11, 3, 1)).step(batch)
        loss = squared_error(plain(batch[0]), batch[1])
        loss.backward()
        assert torch.equal(step[0], loss)
        for name, parameter in plain.named_parameters():
            assert torch.equal(step[1][name], parameter.grad), name


def blanked(x: Tensor) -> Tensor:
    x[:, 0] = 0.0
    return x


WRITES = {
    "relu": lambda x: x.relu_(),
    "a module": nn.ReLU(inplace=True),
    "a number": lambda x: x.mul_(2),
    "a sum": lambda x: x.add_(x.detach()),
    "an element": blanked,
    "a view": lambda x: x.view(-1, 4).relu_().view(-1, 8),
    "a mask": lambda x: x.masked_fill_(x > 1, 1.0),
}


class Writing(Net):
    """Writes to what a dropout returned, as `nn.Sequential(Dropout(), ReLU(inplace=True))`."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = WRITES[write]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.write(self.drop(layer(x), 0.25)) + self.write(self.drop(x, 0.0).clone())
        return self.write(self.drop(x, 0.5))


@one_of(6)
@pytest.mark.parametrize("write", WRITES)
def test_the_result_of_a_dropout_may_be_written_to(write: str) -> None:
    batch = torch.randn(4, 8), torch.randn(4, 8)
    model, plain, numbers = Writing(write), Writing(write), count()
    captured = capture(model, squared_error, batch)

    def drop(x: Tensor, p: float) -> Tensor:
        return x * mask(11, 3, next(numbers), *x.shape, p=p) * (1 / (1 - p)) if p else x * 1

    plain.drop = drop
    plain.load_state_dict(model.state_dict())
    loss, gradients = Interpreter(captured, state(model), random=(11, 3, 1)).step(batch)[:2]

    wanted = squared_error(plain(batch[0]), batch[1])
    wanted.backward()
    assert torch.equal(loss, wanted)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_it_may_be_written_to_in_evaluation(p: float) -> None:
    layers = nn.Linear(8, 8), nn.Dropout(p), nn.ReLU(inplace=True), nn.Linear(8, 1)
    model = nn.Sequential(*layers).eval()
    batch = torch.randn(4, 8), torch.randn(4, 1)

    assert_parity(capture(model, squared_error, batch), model, squared_error, batch)


def test_regions_with_dropout_read_the_counter() -> None:
    captured = capture(Net(), squared_error, (torch.randn(4, 8), torch.randn(4, 8)))

    assert "random" in captured.model.by_id["PP1"].inputs
    assert captured.model.by_id["PP0"].input_grads == ()
    assert all("random" not in _reads_again(region) for region in captured.model.regions)


def test_a_checkpoint_draws_the_same_mask_again() -> None:
    class Recomputing(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    batch = torch.randn(4, 8), torch.randn(4, 8)
    models = Net(), Recomputing()
    captured = [capture(model, squared_error, batch) for model in models]

    for split in (False, True):
        plain, again = (
            Interpreter(found, state(models[0]), split=split, random=(11, 3, 1)).step(batch)
            for found in captured
        )
        torch.testing.assert_close(again, plain, rtol=0, atol=0)
    kept = [sum(len(region.saved) for region in found.model.regions) for found in captured]
    assert kept[1] < kept[0]
    assert "random" in _reads_again(captured[1].model.by_id["PP1"])


def test_dropout_does_nothing_in_a_model_that_is_not_training() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.layer(x)).mean()

    model = Quiet().eval()
    captured = capture(model, None, (torch.randn(4, 8),))

    assert "random" not in captured.model.values
    assert_parity(captured, model, None, (torch.randn(4, 8),))


def _reads_again(region) -> list[str]:
    return [region.inputs[i] for i in region.backward_inputs]
