"""How tensors of a batch lie in memory, and whether they need gradients, if a forward asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from draws import one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Split, Trainer, rehearse, where
from piper.errors import InputError

X, Y = torch.linspace(-1, 1, 24).view(2, 3, 4), torch.ones(2, 3, 4)
Ask = Callable[[Tensor], float]
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.a, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.ask(x)


def made(ask: Ask, loss: Loss = F.mse_loss) -> Trainer:
    return Trainer(Net(ask), loss, [Place(where(), [0])], example=(X, Y), device="cpu")


def other_layout(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_gradient(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


ASKED: dict[str, tuple[Ask, Callable[[Tensor], Tensor]]] = {
    "contiguous": (lambda x: 1.0 + x.is_contiguous(), other_layout),
    "strides": (lambda x: 1.0 + x.stride()[1], other_layout),
    "one stride": (lambda x: 1.0 + x.stride(1), other_layout),
    "requires a gradient": (lambda x: 1.0 + x.requires_grad, with_gradient),
    "is a leaf": (lambda x: 1.0 + x.is_leaf, lambda x: with_gradient(x) * 1),
    "a view of the memory": (lambda x: x.as_strided((1,), (1,), 5).sum(), other_layout),
}


@one_of(2)
@pytest.mark.parametrize("name", ASKED)
def test_another_layout_is_refused_if_somebody_asks(name: str) -> None:
    ask, change = ASKED[name]
    trainer = made(ask)
    trainer.step(X, Y)

    with pytest.raises(InputError, match=r"test_batch_layouts.py:\d+ asks how a tensor"):
        trainer.step(change(X), Y)
    with pytest.raises(InputError, match=r"test_batch_layouts.py:\d+ asks how a tensor"):
        trainer.evaluate([(change(X), Y)])
    trainer.close()


@pytest.mark.parametrize("name", ["strides", "requires a gradient"])
def test_a_rehearsal_refuses_it_too(name: str) -> None:
    ask, change = ASKED[name]
    for given in ([(X, Y), (change(X), Y)], [(change(X), Y)]):
        with pytest.raises(InputError, match=r"test_batch_layouts.py:\d+ asks how a tensor"):
            rehearse(Net(ask), F.mse_loss, [Place(where(), [0])], given)


def noted(x: Tensor, name: str) -> Tensor:
    found = x.clone()
    setattr(found, name, 2.0)
    return found


def test_an_attribute_that_somebody_reads_is_refused() -> None:
    ask: Ask = lambda x: getattr(x, "noted", 1.0)  # noqa: E731
    trainer = made(ask)
    trainer.step(X, Y)
    trainer.step(noted(X, "other"), Y)

    with pytest.raises(InputError, match="a tensor has an attribute 'noted'"):
        trainer.step(noted(X, "noted"), Y)
    with pytest.raises(InputError, match="a tensor has an attribute 'noted'"):
        trainer.predict(noted(X, "noted"))
    trainer.close()
    with pytest.raises(InputError, match="a tensor has an attribute 'noted'"):
        rehearse(Net(ask), F.mse_loss, [Place(where(), [0])], [(noted(X, "noted"), Y)])


def test_a_loss_may_ask_too() -> None:
    trainer = made(lambda x: 1.0, lambda out, y: F.mse_loss(out, y) * (1 + y.is_contiguous()))
    trainer.step(X, Y)

    with pytest.raises(InputError, match=r"test_batch_layouts.py:\d+ asks how a tensor"):
        trainer.step(X, other_layout(Y))
    trainer.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Trainer]:
    """Asks for the layout of what it has computed, which is as in eager training."""
    trainer = made(lambda x: 1.0 + (x * 2).transpose(1, 2).is_contiguous())
    yield trainer
    trainer.close()


@pytest.mark.parametrize("change", [other_layout, with_gradient])
def test_it_does_not_matter_if_nobody_asks(
    plain: Trainer, change: Callable[[Tensor], Tensor]
) -> None:
    found, expected = plain.evaluate([(change(X), Y)]), plain.evaluate([(X, Y)])
    assert found.loss == pytest.approx(expected.loss)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.a(torch.view_as_real(z).sum(-1)) + x


@pytest.mark.parametrize("parts", [1, 2])
def test_conjugates_and_negatives_are_computed_before_the_step(parts: int) -> None:
    model, z = Parts(), torch.complex(X, Y)
    example = z.conj(), z.conj().imag, Y
    assert example[0].is_conj()
    assert example[1].is_neg()
    strategy = [Place(where(), [0]), Split("MB", parts)]
    trainer = Trainer(model, F.mse_loss, strategy, example=example, device="cpu")

    plain = F.mse_loss(model(z.conj().resolve_conj(), -Y), Y).item()
    assert trainer.step(*example).loss == pytest.approx(plain)
    trainer.close()
