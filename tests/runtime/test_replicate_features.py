"""What users of replicas rely on, each against plain PyTorch."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise

import pytest
import torch
from draws import every
from plain_loop import plain_losses
from pool import run_on
from replicas import (
    ADAMW,
    SGD,
    Net,
    assert_same,
    captured,
    data,
    masked,
    plain,
    train_all,
    train_differently,
    train_growing,
    train_on_the_same,
    train_weighed,
)
from replicas import batches as parity_batches
from shared_capture import using
from torch import Tensor, nn
from torch.nn import functional

from piper import Place, Replicate, Split, annotate, rehearse, where
from piper.directives import Strategy
from piper.errors import RunError, StrategyError
from piper.strategies import BUILDERS

LEVELS = (0, 1, 2, 3)
double = partial(torch.tensor, dtype=torch.float64)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


def two(zero: int, parts: int = 2, **options: object) -> Strategy:
    """Everything twice."""
    keep = Replicate(where(), [0, 1], zero=zero, **options)
    return Strategy([Place(where(), [0, 1]), keep, Split("MB", parts)])


def plainly(model: nn.Module, loss_fn, batches, optimizer) -> tuple[list[float], dict]:
    """The whole batch at once."""
    steps = optimizer(list(model.named_parameters()))
    losses = plain_losses(steps, batches, lambda x, y: loss_fn(model(x), y))
    return losses, {name: tensor.detach() for name, tensor in model.named_parameters()}


def assert_trains(result, reference: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, parameters = reference
    close(double(result.losses), double(losses))
    for name, tensor in parameters.items():
        close(result.parameters[name], tensor)


FOUR = [("1f1b", 1), ("zbv", 1), ("interleaved-zb", 2), ("1f1b", 2), ("dualpipe", 2)]
FOUR += [("dualpipev", 2)]


@pytest.mark.parametrize(("schedule", "pp"), every(4, FOUR))
def test_four_replicas_train_as_one_process(schedule: str, pp: int) -> None:
    dp = 2 if schedule == "dualpipe" else 4
    parts = 2 if pp == 1 else 4
    for zero in LEVELS:
        strategy = BUILDERS[schedule](pp=pp, microbatches=parts, dp=dp, zero=zero)
        stages = sum(isinstance(directive, Place) for directive in strategy)
        model, loss_fn, found = captured("uneven", stages, 1)
        reference = plain("uneven", stages, 4 * parts, 4 * parts)
        batches = parity_batches("uneven", 4 * parts)

        with using(found):
            result = rehearse(model, loss_fn, strategy, batches, optimizer=ADAMW)

        close(double(result.losses), double(reference.loss))
        close(double(result.grad_norms), double(reference.norms))
        for part in reference.parameters:
            close(result.parameters[part.name].flatten(), part.values)


def test_four_processes_shard_within_pairs_and_replicate_across() -> None:
    texts = []
    for zero in LEVELS:
        keep = Replicate(where(), [[0, 1], [2, 3]], zero=zero, reduce_stream="r")
        strategy = Strategy([Place(where(), [0, 1, 2, 3]), keep, Split("MB", 2)])
        texts.append(strategy.to_json())

    runs = run_on(4, train_all, "uneven", 2, 8, texts)

    for of_level in zip(*runs, strict=True):
        assert_same(of_level, plain("uneven", 2, 8, 8))


def test_clipping_uses_the_norm_of_the_averaged_gradients() -> None:
    texts = [two(zero).to_json() for zero in LEVELS]
    reference = plain("uneven", 2, 4, 4, max_norm=0.05)
    assert min(reference.norms) > 0.05, "nothing is clipped"

    runs = run_on(2, train_all, "uneven", 2, 4, texts, 0.05)

    for of_level in zip(*runs, strict=True):
        assert_same(of_level, reference)


@pytest.mark.parametrize("zero", LEVELS)
def test_different_levels_for_different_regions(zero: int) -> None:
    places = [Place(where(), [0, 1]), Split("MB", 3)]
    keep = [Replicate(where(PP=k), [0, 1], zero=(zero + k) % 4) for k in range(2)]
    reference = plainly(Net(), functional.mse_loss, data(), lambda named: SGD(named))

    result = rehearse(Net(), functional.mse_loss, [*places, *keep], data(), optimizer=SGD)

    assert_trains(result, reference)


@pytest.mark.parametrize("zero", [0, 2])
def test_microbatches_of_all_replicas_weigh_what_the_user_says(zero: int) -> None:
    reference = plainly(Net(), masked, data(), lambda named: SGD(named))

    result = rehearse(
        Net(), masked, two(zero), data(), optimizer=SGD,
        loss_weight=lambda x, y: (y[:, 0] > -0.7).sum(),
    )  # fmt: skip

    assert_trains(result, reference)


def test_processes_tell_each_other_what_their_batches_weigh() -> None:
    runs = run_on(2, train_weighed, two(2).to_json())

    losses, parameters = plainly(Net(), masked, data(), lambda named: SGD(named))
    for found, ours in runs:
        close(double(found), double(losses))
        for name, tensor in (ours or {}).items():
            close(tensor, parameters[name])


def test_a_sum_is_the_sum_over_all_replicas() -> None:
    def summed(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()

    slow = partial(torch.optim.SGD, lr=1e-3)
    reference = plainly(Net(), summed, data(), lambda named: slow(named))

    result = rehearse(Net(), summed, two(1), data(), optimizer=slow, reduction="sum")

    assert_trains(result, reference)


def test_dropout_is_the_same_however_many_replicas_there_are() -> None:
    model = partial(Net, nn.Dropout(0.5))
    alone = rehearse(
        model(), functional.mse_loss, [Place(where(), [0])], data(), optimizer=SGD, seed=4
    )

    both = rehearse(model(), functional.mse_loss, two(3), data(), optimizer=SGD, seed=4)

    assert_trains(both, (list(alone.losses), dict(alone.parameters)))
    assert (
        both.losses
        != rehearse(model(), functional.mse_loss, two(3), data(), optimizer=SGD, seed=5).losses
    )


def by_shape_and_name(named) -> torch.optim.Optimizer:
    """Weight decay for matrices only, and a learning rate of its own for one of them."""
    named = list(named)
    decayed = [p for n, p in named if p.ndim > 1 and "last" not in n]
    plain_ = [p for n, p in named if p.ndim < 2]
    last = [p for n, p in named if p.ndim > 1 and "last" in n]
    groups = [
        {"params": decayed, "weight_decay": 0.5},
        {"params": plain_, "weight_decay": 0.0},
        {"params": last, "lr": 0.03},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


@pytest.mark.parametrize("zero", LEVELS)
def test_parameter_groups_are_chosen_by_name_and_shape_as_on_one_device(zero: int) -> None:
    reference = plainly(Net(), functional.mse_loss, data(), by_shape_and_name)

    result = rehearse(Net(), functional.mse_loss, two(zero), data(), optimizer=by_shape_and_name)

    assert_trains(result, reference)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop"])
def test_optimizers_that_treat_elements_by_themselves_are_exact_on_shards(kind: str) -> None:
    make = partial(getattr(torch.optim, kind), lr=1e-2)
    reference = plainly(Net(), functional.mse_loss, data(), lambda named: make(named))

    result = rehearse(Net(), functional.mse_loss, two(2), data(), optimizer=make)

    assert_trains(result, reference)


def test_an_optimizer_that_needs_whole_parameters_is_refused_on_shards() -> None:
    with pytest.raises(StrategyError) as refused:
        rehearse(Net(), functional.mse_loss, two(1), data(), optimizer=torch.optim.Adafactor)

    assert str(refused.value) == (
        "optimizer: Adafactor may need whole parameters, and zero=1, 2 and 3 give it shards "
        "(`Shard` does, too)\n"
        "  fix: use zero=0 and no `Shard`, or one of SGD, Adam, AdamW, NAdam, RAdam, Adamax, "
        "Adagrad, Adadelta, "
        "RMSprop, Rprop, ASGD; if it treats every element by itself, say so with the class "
        "attribute elementwise = True"
    )


def test_an_optimizer_that_needs_whole_parameters_has_them_with_zero_0() -> None:
    make = partial(torch.optim.Adafactor, lr=1e-2)
    reference = plainly(Net(), functional.mse_loss, data(), lambda named: make(named))

    result = rehearse(Net(), functional.mse_loss, two(0), data(), optimizer=make)

    assert_trains(result, reference)


@pytest.mark.parametrize("zero", LEVELS)
def test_one_replica_needs_nobody(zero: int) -> None:
    strategy = [Place(where(), [0]), Replicate(where(), [0], zero=zero), Split("MB", 2)]
    reference = plainly(Net(), functional.mse_loss, data(), lambda named: SGD(named))

    result = rehearse(Net(), functional.mse_loss, strategy, data(), optimizer=SGD)

    assert_trains(result, reference)


class Shared(nn.Module):
    """Gradients that are one tensor, and a region that hands on a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b = (nn.Parameter(torch.randn(6)) for _ in range(2))
        self.table = nn.Parameter(torch.randn(8, 6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        with annotate("L"):
            rows = self.table[1:2]  # no copy: memory of the parameter itself
            x = x + self.a + self.b
        for layer in self.layers:
            with annotate("L"):
                x = torch.tanh(layer(x))
        with annotate("L"):
            return x + rows


@pytest.mark.parametrize("zero", LEVELS)
def test_what_is_kept_of_dropped_parameters_stays_what_it_was(zero: int) -> None:
    reference = plainly(Shared(), functional.mse_loss, data(), lambda named: SGD(named))

    result = rehearse(
        Shared(), functional.mse_loss, two(zero, gather_buffers=1), data(), optimizer=SGD
    )

    assert_trains(result, reference)


class Mixed(nn.Module):
    """One region with parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.fine = nn.Linear(6, 6).double()
        self.coarse = nn.Parameter(torch.randn(5).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.fine(x) * self.coarse.double().sum()


@pytest.mark.parametrize("zero", LEVELS)
def test_parameters_of_several_types_travel_in_messages_of_their_own(zero: int) -> None:
    losses, parameters = plainly(Mixed(), functional.mse_loss, data(), lambda named: SGD(named))

    result = rehearse(Mixed(), functional.mse_loss, two(zero), data(), optimizer=SGD)

    torch.testing.assert_close(torch.tensor(result.losses), torch.tensor(losses), rtol=1e-6, atol=0)
    for name, tensor in parameters.items():
        torch.testing.assert_close(result.parameters[name], tensor, rtol=1e-6, atol=1e-7)


def test_replicas_of_different_lists_are_consistent() -> None:
    """Every pair of neighbours in a ring of lists that share no place."""
    lists = [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    for one, other in pairwise(lists):
        strategy = [
            Place(where(PP=0), one), Place(where(PP=1), other), Split("MB", 2),
            Replicate(where(PP=0), one, zero=3), Replicate(where(PP=1), other, zero=2),
        ]  # fmt: skip
        reference = plainly(Net(), functional.mse_loss, data(), lambda named: SGD(named))

        result = rehearse(Net(), functional.mse_loss, strategy, data(), optimizer=SGD)

        assert_trains(result, reference)


def test_a_device_that_fails_ends_the_others_at_once() -> None:
    def broken(named) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(named, lr=0.1)
        optimizer.step = lambda: 1 / 0  # type: ignore[method-assign]
        return optimizer

    started = time.perf_counter()
    with pytest.raises(RunError, match="ZeroDivisionError"):
        rehearse(Net(), functional.mse_loss, two(0), data(), optimizer=broken)

    assert time.perf_counter() - started < 30


def test_the_norm_is_that_of_the_gradients_before_an_optimizer_changes_them() -> None:
    nesterov = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=True)
    alone = rehearse(Net(), functional.mse_loss, [Place(where(), [0])], data(), optimizer=nesterov)

    both = rehearse(Net(), functional.mse_loss, two(0), data(), optimizer=nesterov)

    close(double(both.grad_norms), double(alone.grad_norms))


class Anchored(torch.optim.SGD):
    """Pulls parameters back to where they started: its state is made of their first values."""

    elementwise = True

    def __init__(self, named) -> None:
        super().__init__(named, lr=0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["anchor"] = parameter.detach().clone()

    def step(self, closure=None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.lerp_(self.state[parameter]["anchor"], 0.3)


@pytest.mark.parametrize("zero", LEVELS)
def test_what_an_optimizer_makes_of_first_values_is_cut_into_shards(zero: int) -> None:
    reference = plainly(Net(), functional.mse_loss, data(), Anchored)

    result = rehearse(Net(), functional.mse_loss, two(zero), data(), optimizer=Anchored)

    assert_trains(result, reference)


def of_the_model(named) -> torch.optim.Optimizer:
    return torch.optim.SGD(Net().parameters(), lr=0.1)


def one_for_all() -> object:
    made: list[torch.optim.Optimizer] = []

    def make(named) -> torch.optim.Optimizer:
        if made:
            made[0].add_param_group({"params": [p for _, p in named]})
        else:
            made.append(torch.optim.SGD([p for _, p in named], lr=0.1))
        return made[0]

    return make


def hooked(named) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(named, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def hooking(named) -> torch.optim.Optimizer:
    named = list(named)
    named[0][1].register_hook(lambda grad: grad)
    return torch.optim.SGD(named, lr=0.1)


def choosy(named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for n, p in named if "first" in n], lr=0.1)


class Hoarder(torch.optim.SGD):
    """Keeps parameters of its own accord."""

    elementwise = True

    def __init__(self, named) -> None:
        super().__init__(named, lr=0.1)
        self.mine = [p for group in self.param_groups for p in group["params"]]


BAD_OPTIMIZERS = {
    "of other parameters": (of_the_model, "but trains other parameters", LEVELS),
    "one for all": (one_for_all(), "but trains other parameters", (1,)),
    "none": (lambda named: None, "it made NoneType, which is not a torch.optim.Optimizer", (0, 2)),
    "step hooks": (hooked, "it has step hooks, which would see only some of the", (0, 3)),
    "gradient hooks": (hooking, "it puts hooks on gradients, which Piper never calls", (0, 1)),
    "nothing chosen": (choosy, "it got last.weight, last.bias and chose none", (0, 2)),
    "a hoarder": (Hoarder, "it keeps parameters besides those in param_groups", (1, 3)),
}


@pytest.mark.parametrize("case", BAD_OPTIMIZERS)
def test_an_optimizer_that_would_train_something_else_is_refused(case: str) -> None:
    make, message, levels = BAD_OPTIMIZERS[case]
    for zero in levels:
        with pytest.raises(StrategyError, match=message):
            rehearse(Net(), functional.mse_loss, two(zero), data(), optimizer=make)


def test_a_replica_in_which_nothing_counts_adds_nothing_to_a_sum() -> None:
    def summed(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square().sum(1) * (target[:, 0] > 0)).sum()

    batches = data()
    for _, y in batches:
        y[12:, 0] = -1.0  # the rows of the second replica
    slow = partial(torch.optim.SGD, lr=1e-2)
    count = lambda x, y: (y[:, 0] > 0).sum()  # noqa: E731
    reference = plainly(
        Net(), lambda o, t: summed(o, t) / count(o, t), batches, lambda named: slow(named)
    )

    result = rehearse(
        Net(), summed, two(1), batches, optimizer=slow, reduction="sum", loss_weight=count
    )

    assert_trains(result, reference)


@pytest.mark.parametrize("case", ["shapes", "data", "later data"])
def test_processes_that_do_different_things_are_told(case: str) -> None:
    found = run_on(2, train_differently, case)

    wanted = {
        "shapes": "batch: device 1 has a batch of 4 rows, and device 0 one of 8\n  fix: load "
        "data by trainer.replica: processes of one replica have the same batch; and leave out a "
        "smaller last batch (drop_last=True), or, if replicas always have different numbers of "
        "rows, give the strategy replica_sizes=, such as [8, 4]",
        "data": "batch: the processes of replica 0 were given different batches\n"
        "  fix: load the data by trainer.replica of trainer.replicas, not by rank, and seed what "
        "draws or shuffles it alike in all processes",
    }
    assert all(text.startswith(wanted[case.removeprefix("later ")]) for text in found), found


def test_replicas_with_the_same_batch_are_told_once() -> None:
    assert run_on(2, train_on_the_same) == [
        [
            "replicas 0 and 1 were given the same batch, so they train on its rows twice: load the "
            "data by trainer.replica of trainer.replicas"
        ],
        [],
    ]


def test_a_state_dict_has_what_a_later_kind_of_batch_brought_in() -> None:
    for whole, trained in run_on(2, train_growing):
        if whole is not None:
            for name, tensor in trained.items():
                close(whole[name], tensor)
