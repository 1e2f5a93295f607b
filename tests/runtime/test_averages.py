"""Averages of weights (EMA) are those of a plain loop with torch's AveragedModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from averaging import (
    ADAM,
    DECAY,
    STEPS,
    Tied,
    data,
    loss_of,
    plain,
    save_beside,
    train_on,
    trainer_under,
)
from draws import every
from pool import run_on
from torch import Tensor
from torch.nn import functional

import piper
from piper.errors import InputError
from piper.runtime.checkpoint.summary import summary
from piper.strategies import gpipe, interleaved_one_f_one_b, one_f_one_b, zb_h1

STRATEGIES: dict[str, Any] = {
    "one device": None,
    "pipeline": gpipe(pp=3, microbatches=2),
    "zero 1": one_f_one_b(pp=2, dp=2, microbatches=2, zero=1),
    "zero 2": one_f_one_b(pp=1, dp=4, microbatches=2, zero=2),
    "zero 3": zb_h1(pp=2, dp=2, microbatches=2, zero=3, bucket_mb=0.0002),
    "interleaved": interleaved_one_f_one_b(pp=2, microbatches=4, remat=True),
    "offload": one_f_one_b(pp=1, dp=2, microbatches=2, zero=1, offload="optimizer"),
    "tensor": one_f_one_b(pp=1, tp=2, microbatches=2),
}


def same(found: Any, wanted: dict[str, Tensor]) -> None:
    assert found.keys() <= wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", every(2, STRATEGIES))
def test_averages_are_those_of_torch(name: str) -> None:
    model = Tied().double()

    done = piper.rehearse(
        model, functional.mse_loss, STRATEGIES[name], data(), optimizer=ADAM, ema=DECAY
    )

    parameters, averages = plain()
    same(done.parameters, parameters)
    same(done.averages, averages)
    moved = [(done.averages[one] - done.parameters[one]).abs().max() for one in done.averages]
    assert max(moved) > 1e-3  # the averages are not the parameters


def test_a_summary_of_a_checkpoint_names_averages(tmp_path: Path) -> None:
    with trainer_under(None) as trainer:
        trainer.step(*data()[0])
        trainer.save(tmp_path / "run")

    assert "  averages   of the weights (ema)" in list(summary(tmp_path / "run"))


def test_without_ema_nothing_is_averaged() -> None:
    done = piper.rehearse(Tied().double(), functional.mse_loss, None, data(1), optimizer=ADAM)

    assert done.averages == {}


@pytest.mark.processes
def test_averages_are_evaluated_saved_resumed_and_moved(tmp_path: Path) -> None:
    results = run_on(4, train_on, str(tmp_path / "run"))

    early, means, late, last, loss, trained = results[0]
    (_, wanted), (parameters, averages) = plain(2), plain()
    same(means, wanted)
    same(last, averages)
    same(trained, parameters)
    for rank in range(4):
        assert results[rank][0] == pytest.approx(loss_of(wanted), rel=1e-10)
        assert results[rank][2] == pytest.approx(loss_of(averages), rel=1e-10)
        assert results[rank][4] == pytest.approx(loss_of(parameters), rel=1e-10)


def test_a_bucket_that_a_later_step_is_the_first_to_use_has_stood_still() -> None:
    """A number among the inputs chooses what is used: the plain loop averages it from the start."""

    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: Tensor, which: int) -> Tensor:
            with piper.annotate("PP"):
                x = self.one(x)
            if which:
                with piper.annotate("PP"):
                    x = self.two(x)
            return x

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    trainer = piper.Trainer(
        Chosen(), functional.mse_loss, None, example=(x, 0, x), optimizer=ADAM, ema=DECAY,
        device="cpu",
    )  # fmt: skip
    model = Chosen()
    means = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    )
    optimizer = ADAM(model.parameters())
    for which in (0, 1, 1, 0, 1):
        trainer.step(x, which, x)
        optimizer.zero_grad()
        functional.mse_loss(model(x, which), x).backward()
        optimizer.step()
        means.update_parameters(model)

    with trainer.averaged():
        found = trainer.state_dict()
    trainer.close()

    for name, tensor in found.items():
        torch.testing.assert_close(tensor, means.module.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_inside_the_weights_are_only_read_and_after_it_training_goes_on(tmp_path: Path) -> None:
    batches = data()
    trainer = trainer_under(None)
    before = []
    for batch in batches:
        with trainer.averaged():
            trainer.evaluate([batch])
            with pytest.raises(InputError, match="inside `with trainer.averaged"):
                trainer.step(*batch)
            with pytest.raises(InputError, match="inside `with trainer.averaged"):
                trainer.save(tmp_path / "run")
        before.append(trainer.step(*batch).loss)
    parameters, averages = plain()
    same(trainer.state_dict(), parameters)
    with trainer.averaged():
        same(trainer.state_dict(), averages)
        trainer.export(tmp_path / "exported")
        with pytest.raises(InputError, match="inside"), trainer.averaged():
            pass
    trainer.close()
    third = trainer_under(None)
    third.load(tmp_path / "exported")
    same(third.state_dict(), averages)
    third.close()
    assert len(before) == STEPS


def test_wrong_decays_and_missing_averages_are_told() -> None:
    for wrong in (1, 1.5, -0.1, "0.9", True):
        with pytest.raises(InputError, match="is not a decay"):
            piper.rehearse(Tied(), functional.mse_loss, None, data(1), ema=wrong)
    first = data()[0]
    trainer = piper.Trainer(Tied().double(), functional.mse_loss, None, example=first, device="cpu")
    with pytest.raises(InputError, match="keeps no averages"), trainer.averaged():
        pass
    trainer.close()


def test_with_masters_the_copies_that_compute_hold_the_averages_too() -> None:
    x, y = (one.float() for one in data()[0])
    given = {"example": (x, y), "optimizer": ADAM, "precision": "bf16", "device": "cpu"}
    trainer = piper.Trainer(Tied(), functional.mse_loss, None, ema=DECAY, **given)
    for _ in range(3):
        trainer.step(x, y)
    before = trainer.evaluate([(x, y)]).loss
    with trainer.averaged():
        inside, averages = trainer.evaluate([(x, y)]).loss, trainer.state_dict()
    after = trainer.evaluate([(x, y)]).loss
    trainer.close()
    model = Tied()
    model.load_state_dict(averages)
    other = piper.Trainer(model, functional.mse_loss, None, **given)
    wanted = other.evaluate([(x, y)]).loss
    other.close()

    assert before == after != inside
    assert inside == wanted


def test_a_checkpoint_that_is_written_beside_is_complete_before_others_exchange(
    tmp_path: Path,
) -> None:
    found = run_on(2, save_beside, str(tmp_path / "run"))

    assert found[0] == found[1] and len(found[0]) == 6
