"""What a forward remembers of batches of one shape, and reads for another.

Each shape has a program of its own. If shapes are not independent, that is an error; otherwise
training is that of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import every, one_of
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional as F

from piper import Place, Trainer, where
from piper.capture import capture
from piper.errors import CaptureError
from piper.job.python_state import PythonState

WIDTH, LENGTHS = 4, (3, 5, 3, 4)
SGD = partial(torch.optim.SGD, lr=0.3)
Kept = dict[str, Any]
Rule = Callable[[Kept, Tensor], Tensor]


def positions(x: Tensor, count: int, base: float = 1.0) -> Tensor:
    return torch.cos(torch.arange(count, dtype=x.dtype) / base)[:, None]


def longest(kept: Kept, x: Tensor) -> Tensor:
    kept["n"] = max(kept.get("n", 0), x.shape[1])
    return x * kept["n"]


def shortest(kept: Kept, x: Tensor) -> Tensor:
    kept["n"] = min(kept.get("n", 99), x.shape[1])
    return x * kept["n"]


def first(kept: Kept, x: Tensor) -> Tensor:
    return x / kept.setdefault("n", x.shape[1])


def dynamic_base(kept: Kept, x: Tensor) -> Tensor:
    n = x.shape[1]
    if n > kept.get("max", 3):
        kept["max"], kept["base"] = n, 2.0 * n
    return x * positions(x, n, kept.get("base", 1.0))


def table_of_the_longest(kept: Kept, x: Tensor) -> Tensor:
    n = x.shape[1]
    if "table" not in kept or len(kept["table"]) < n:
        kept["table"] = positions(x, n, n)
    return x * kept["table"][:n]


def table_of_the_first(kept: Kept, x: Tensor) -> Tensor:
    n = x.shape[1]
    if "table" not in kept:
        kept["table"] = torch.full((8, 1), float(n), dtype=x.dtype)
    return x * kept["table"][:n]


def flag(kept: Kept, x: Tensor) -> Tensor:
    if x.shape[1] > 4:
        kept["long"] = True
    return x.tanh() if "long" in kept else x.sin()


def lengths_so_far(kept: Kept, x: Tensor) -> Tensor:
    kept.setdefault("seen", set()).add(x.shape[1])
    return x * len(kept["seen"])


def features(kept: Kept, x: Tensor) -> Tensor:
    """What a short batch leaves is added to a long one."""
    if x.shape[1] > 4:
        return x + kept.get("mean", 0.0)
    kept["mean"] = x.detach().mean()
    return x


REMEMBER: list[Rule] = [
    longest, shortest, first, dynamic_base, table_of_the_longest, table_of_the_first, flag,
    lengths_so_far, features,
]  # fmt: skip


def table_at_the_longest(kept: Kept, x: Tensor) -> Tensor:
    """As rotary tables are kept: its rows do not depend on how many there are."""
    n = x.shape[1]
    if "table" not in kept or len(kept["table"]) < n:
        kept["table"] = positions(x, n)
    return x * kept["table"][:n]


def mask_at_the_longest(kept: Kept, x: Tensor) -> Tensor:
    n = x.shape[1]
    if "mask" not in kept or len(kept["mask"]) < n:
        kept["mask"] = torch.full((n, n), float("-inf"), dtype=x.dtype).triu(1)
    return (x @ x.mT + kept["mask"][:n, :n]).softmax(-1) @ x


def table_by_length(kept: Kept, x: Tensor) -> Tensor:
    n = x.shape[1]
    if n not in kept.setdefault("tables", {}):
        kept["tables"][n] = positions(x, n, n)
    return x * kept["tables"][n]


def last_length(kept: Kept, x: Tensor) -> Tensor:
    n = x.shape[1]
    if kept.get("n") != n:
        kept["n"], kept["table"] = n, positions(x, n, n)
    return x * kept["table"]


def longest_unread(kept: Kept, x: Tensor) -> Tensor:
    kept["n"] = max(kept.get("n", 0), x.shape[1])
    return x


def attention_kept(kept: Kept, x: Tensor) -> Tensor:
    kept["weights"] = (x @ x.mT).softmax(-1)
    return kept["weights"] @ x


INDEPENDENT: list[Rule] = [
    table_at_the_longest, mask_at_the_longest, table_by_length, last_length, longest_unread,
    attention_kept,
]  # fmt: skip

GLOBAL: Kept = {}


class InDict(nn.Module):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule, self.kept = rule, Kept()

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self.kept, x)


class InAttributes(InDict):
    def forward(self, x: Tensor) -> Tensor:
        return self.rule(vars(self), x)


class InGlobal(InDict):
    def forward(self, x: Tensor) -> Tensor:
        return self.rule(GLOBAL, x)


class InClass(InDict):
    shared: Kept = {}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self.shared, x)


class InObject(InDict):
    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.box = SimpleNamespace()

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(vars(self.box), x)


class InClosure(InDict):
    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        kept = Kept()
        self.call = lambda x: rule(kept, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        GLOBAL.clear()
        InClass.shared.clear()
        torch.manual_seed(0)
        self.a, self.middle, self.b = nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self.a(x)))


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 4, n, WIDTH, generator=draw)) for n in LENGTHS]


def plain(model: nn.Module) -> list[float]:
    optimizer = SGD(model.parameters())
    return plain_losses(optimizer, batches(), lambda x, y: F.mse_loss(model(x), y))


def captured(model: nn.Module) -> None:
    """For two lengths."""
    state = PythonState()
    for x, y in batches()[:2]:
        state.captured(model, F.mse_loss, partial(capture, model, F.mse_loss, (x, y)))


def made(model: nn.Module, loss: Any = F.mse_loss) -> Trainer:
    example = batches()[0]
    return Trainer(model, loss, [Place(where(), [0])], example=example, optimizer=SGD, device="cpu")


def trained(model: nn.Module) -> list[float]:
    trainer = made(model)
    try:
        return [trainer.step(*batch).loss for batch in batches()]
    finally:
        trainer.close()


PLACES = [InDict, InAttributes, InGlobal, InClass, InObject, InClosure]


def in_all_places(rules: list[Rule]) -> dict[str, tuple[Rule, type[InDict]]]:
    """Each rule in each place, every sixth in another one."""
    turned = ((rule, PLACES[(k + j) % 6]) for k, rule in enumerate(rules) for j in range(6))
    return {f"{rule.__name__} {place.__name__}": (rule, place) for rule, place in turned}


WRONG, RIGHT = in_all_places(REMEMBER), in_all_places(INDEPENDENT)


@one_of(2)
@pytest.mark.parametrize(("rule", "place"), every(39, WRONG.values(), WRONG))
def test_what_other_lengths_left_is_not_ignored(rule: Rule, place: type[InDict]) -> None:
    with pytest.raises(CaptureError, match=r"test_lengths_remembered.py:\d+: batches of other sh"):
        captured(Net(place(rule)))


@pytest.mark.parametrize(("rule", "place"), every(52, RIGHT.values(), RIGHT))
def test_what_does_not_depend_on_other_lengths_is_kept(rule: Rule, place: type[InDict]) -> None:
    captured(Net(place(rule)))


@pytest.mark.parametrize(("rule", "place"), every(62, RIGHT.values(), RIGHT))
def test_it_trains_as_in_plain_pytorch(rule: Rule, place: type[InDict]) -> None:
    expected = plain(Net(place(rule)))

    assert trained(Net(place(rule))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rule", every(3, [longest, table_of_the_longest, dynamic_base]))
def test_a_model_that_was_called_with_the_longest_batch_trains(rule: Rule) -> None:
    model, other = Net(InDict(rule)), Net(InDict(rule))
    for one in (model, other):
        one(torch.zeros(4, max(LENGTHS), WIDTH))

    assert trained(model) == pytest.approx(plain(other), rel=1e-5)


def test_batches_of_an_evaluation_count() -> None:
    trainer = made(Net(InDict(longest)))
    long, short = batches()[1], batches()[0]
    trainer.step(*short)

    with pytest.raises(CaptureError, match="batches of other shapes change model.middle.kept"):
        trainer.evaluate([long])
    trainer.close()


def test_a_loss_may_not_remember_either() -> None:
    kept = Kept()

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(longest(kept, output), y)

    trainer = made(Net(nn.Identity()), loss)
    trainer.step(*batches()[0])
    with pytest.raises(CaptureError, match="batches of other shapes change"):
        trainer.step(*batches()[1])
    trainer.close()


class Grown(nn.Module):
    """A buffer that gets longer, by one of these."""

    def __init__(self, grow: Callable[[Grown, int], None]) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3, 1), persistent=False)
        self.grow = grow

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > len(self.scale):
            self.grow(self, x.shape[1])
        return x * self.scale[: x.shape[1]]


def by_cat(module: Grown, length: int) -> None:
    more = torch.full((length - len(module.scale), 1), 2.0)
    module.scale = torch.cat([module.scale, more])


def anew(module: Grown, length: int) -> None:
    module.scale = torch.full((length, 1), 2.0)


def registered(module: Grown, length: int) -> None:
    module.register_buffer("scale", torch.full((length, 1), 2.0), persistent=False)


def by_padding(module: Grown, length: int) -> None:
    module.scale = F.pad(module.scale, (0, 0, 0, length - len(module.scale)), value=2.0)


@one_of(2)
@pytest.mark.parametrize("grow", [by_cat, anew, registered, by_padding])
def test_a_buffer_that_grows_is_refused(grow: Callable[[Grown, int], None]) -> None:
    with pytest.raises(CaptureError, match=r"test_lengths_remembered.py:\d+: .* gives the buffer"):
        captured(Net(Grown(grow)))
