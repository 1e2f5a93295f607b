"""What a training loop does around its steps has an effect, or is an error."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from draws import one_of
from torch import nn
from torch.utils.hooks import RemovableHandle

import piper
from piper import Trainer, where
from piper.errors import CaptureError, InputError

X, Y = torch.linspace(-1, 1, 24).view(4, 6), torch.ones(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh() * self.scale)


Case = tuple[Net, Trainer]


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    torch.manual_seed(0)
    model = Net()
    strategy = [piper.Place(where(), [0])]
    trainer = Trainer(model, nn.functional.mse_loss, strategy, example=(X, Y), device="cpu")
    yield model, trainer
    trainer.close()


@torch.no_grad()
def in_place(model: Net) -> None:
    model.a.weight.mul_(2)


def through_data(model: Net) -> None:
    model.b.bias.data.add_(1)


def assigned_data(model: Net) -> None:
    model.b.bias.data = torch.ones(6)


def loaded(model: Net) -> None:
    model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})


def replaced_parameter(model: Net) -> None:
    model.a.weight = nn.Parameter(torch.ones(6, 6))


def replaced_module(model: Net) -> None:
    model.b = nn.Linear(6, 6)


def filled_buffer(model: Net) -> None:
    model.scale.fill_(0.5)


def assigned_buffer(model: Net) -> None:
    model.scale = torch.zeros(6)


def reset(model: Net) -> None:
    model.a.reset_parameters()


WRITES = [in_place, through_data, assigned_data, loaded, replaced_parameter, replaced_module,
          filled_buffer, assigned_buffer, reset]  # fmt: skip


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes_that_training_would_not_see_are_refused(
    case: Case, write: Callable[[Net], None]
) -> None:
    model, trainer = case
    trainer.step(X, Y)
    trainer._writes.stepped = 0  # so that writes to .data are looked for
    before = {name: one.clone() for name, one in model.state_dict().items()}

    write(model)

    with pytest.raises(InputError, match="was changed after the Trainer was made"):
        trainer.step(X, Y)
    model.load_state_dict(before)
    trainer.step(X, Y)


def test_weights_of_the_trainer_may_be_loaded_now_or_later(case: Case) -> None:
    model, trainer = case
    trainer.step(X, Y)
    early = trainer.state_dict()
    trainer.step(X, Y)

    for weights in (trainer.state_dict(), early):
        model.load_state_dict(weights)
        trainer._writes.stepped = 0
        trainer.step(X, Y)


HOOKS: list[Callable[[Net], RemovableHandle]] = [
    lambda model: model.a.weight.register_hook(lambda grad: 2 * grad),
    lambda model: model.a.weight.register_post_accumulate_grad_hook(lambda weight: None),
    lambda model: model.b.register_full_backward_hook(lambda *_: None),
    lambda model: model.b.register_full_backward_pre_hook(lambda *_: None),
]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_gradients_that_come_later_are_refused(
    case: Case, hook: Callable[[Net], RemovableHandle]
) -> None:
    model, trainer = case
    trainer.step(X, Y)

    handle = hook(model)

    with pytest.raises(CaptureError, match="it has a hook on gradients"):
        trainer.step(X, Y)
    handle.remove()
    trainer.step(X, Y)


def emptied(model: Net) -> None:
    model.state.zero_()


def assigned_again(model: Net) -> None:
    model.state = torch.zeros(3)


@torch.no_grad()
def zeroed_parameter(model: Net) -> None:
    model.shift.zero_()


def with_another(model: Net) -> None:
    model.state.zero_()
    with torch.no_grad():
        model.shift.clamp_(-100.0, 100.0)


def rewound(model: Net) -> None:
    model.load_state_dict(model.before)


class Stateful(Net):
    """What is at zero at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(3))
        self.shift = nn.Parameter(torch.zeros(6))
        self.table = nn.Parameter(torch.zeros(2000, 4))
        self.before = copy.deepcopy(self.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift + self.table.sum() + self.state.sum()


AGAIN = [emptied, assigned_again, zeroed_parameter, rewound]


@one_of(2)
@pytest.mark.parametrize("write", AGAIN, ids=lambda write: write.__name__)
def test_values_that_are_written_again_are_warned_of(
    write: Callable[[Net], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The model still has them, so that nothing seems to change: training has others."""
    torch.manual_seed(0)
    model = Stateful()
    strategy = [piper.Place(where(), [0])]
    trainer = Trainer(model, nn.functional.mse_loss, strategy, example=(X, Y), device="cpu")
    trainer.step(X, Y)
    trainer.step(X, Y)
    assert "was written" not in caplog.text

    write(model)
    trainer.step(X, Y)
    assert caplog.text.count("with values that it had before, is not seen") == 1
    trainer.step(X, Y)
    model.load_state_dict(trainer.state_dict())
    trainer.step(X, Y)
    assert caplog.text.count("is not seen") == 1
    trainer.close()


class Carrying(Stateful):
    """As a recurrent network that goes on from one batch to the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        self.state.copy_(found.detach().mean(0)[:3])
        return found


@one_of(2)
@pytest.mark.parametrize("write", [*AGAIN, with_another], ids=lambda write: write.__name__)
def test_a_carried_state_that_is_reset_is_refused(write: Callable[[Net], None]) -> None:
    """Training would go on with its own, where plain PyTorch begins anew."""
    model, error = Carrying(), pytest.raises(InputError, match="state was set to values that it")
    trainer = Trainer(model, nn.functional.mse_loss, None, example=(X, Y), device="cpu")
    trainer.step(X, Y)
    trainer.step(X, Y)

    write(model)

    with error if write in (emptied, assigned_again, with_another) else nullcontext():
        trainer.step(X, Y)
    trainer.close()


def test_one_row_of_a_table_that_is_written_is_seen() -> None:
    model = Stateful()
    strategy = [piper.Place(where(), [0])]
    trainer = Trainer(model, nn.functional.mse_loss, strategy, example=(X, Y), device="cpu")
    trainer.step(X, Y)

    with torch.no_grad():
        model.table[9] = 1.0

    with pytest.raises(InputError, match="table was changed after the Trainer was made"):
        trainer.step(X, Y)
    trainer.close()


def half_frozen(net: Net) -> Net:
    net.b.requires_grad_(False)
    return net


FLAGS: list[tuple[Callable[[Net], Net], Callable[[Net], object], str]] = [
    (lambda net: net, lambda net: net.a.requires_grad_(False), "a.weight, a.bias changed between"),
    (lambda net: net, lambda net: net.b.bias.requires_grad_(False), "b.bias"),
    (half_frozen, lambda net: net.b.requires_grad_(True), "b.weight, b.bias changed between"),
    (half_frozen, lambda net: net.a.weight.requires_grad_(False), "a.weight"),
]


@one_of(2)
@pytest.mark.parametrize(("prepare", "change", "named"), FLAGS)
def test_parameters_that_are_frozen_or_trained_later_are_named(
    prepare: Callable[[Net], Net], change: Callable[[Net], object], named: str
) -> None:
    model, strategy = prepare(Net()), [piper.Place(where(), [0])]
    trainer = Trainer(model, nn.functional.mse_loss, strategy, example=(X, Y), device="cpu")
    trainer.step(X, Y)

    change(model)

    with pytest.raises(InputError, match=rf": (batches of this shape use )?{named}.*requires_grad"):
        trainer.step(X, Y)
    trainer.close()


def test_modes_around_a_step_are_refused(case: Case) -> None:
    _, trainer = case

    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="precision="):
        trainer.step(X, Y)
    with torch.inference_mode(), pytest.raises(InputError, match="leave it out"):
        trainer.step(X, Y)
    with torch.no_grad():
        trainer.step(X, Y)


def test_a_trainer_made_under_autocast_is_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="precision="):
        Trainer(Net(), nn.functional.mse_loss, [piper.Place(where(), [0])], example=(X, Y))


def test_what_piper_keeps_on_the_model_is_no_state_of_it(case: Case) -> None:
    _, trainer = case
    trainer.step(X, Y)
    before = trainer._job.python_state.now(), len(trainer._programs.ready)

    trainer.step(X, Y)

    assert (trainer._job.python_state.now(), len(trainer._programs.ready)) == before
