"""What no training step uses is in checkpoints, too: parameters, frozen ones, buffers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import run_on
from torch import nn
from unused_values import ONE, TWO, UNUSED, WithMore, X, made, resumed, state, trained

from piper import Trainer
from piper.errors import InputError
from piper.job.processes.stopping import StopRequest
from piper.runtime.checkpoint.folder import kept_in
from piper.runtime.checkpoint.unused import Unused

SWAPPED = {"unused": "prior", "prior": "unused"}
SGD = partial(torch.optim.SGD, lr=0.1)


class Tabled(nn.Module):
    table: torch.Tensor

    def __init__(self, table: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.full((4,), table), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.table


def refuse_unlike(found: Any, wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        exact = name in UNUSED
        torch.testing.assert_close(
            found[name], tensor, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
        )


@pytest.mark.parametrize("wait", [True, False])
def test_a_new_model_goes_on_with_the_values_of_the_old_one(wait: bool, tmp_path: Path) -> None:
    wanted, answers = trained(tmp_path / "run", wait)

    found, said = resumed(0, ONE.to_json(), tmp_path / "run", tmp_path / "again")
    with made(seed=2) as third:
        third.resume(tmp_path / "again")
        chained, last = state(third), third.predict(X)

    refuse_unlike(found, wanted)
    refuse_unlike(chained, wanted)
    assert torch.allclose(said, answers, rtol=1e-5, atol=1e-6)
    assert torch.equal(last, said)


def test_on_several_processes(tmp_path: Path) -> None:
    wanted, answers = trained(tmp_path / "run")
    given = TWO.to_json(), tmp_path / "run", tmp_path / "again"

    (found, said), (nothing, _) = run_on(2, resumed, *given)
    with made(seed=2) as third:
        third.resume(tmp_path / "again")
        chained = state(third)

    refuse_unlike(found, wanted)
    refuse_unlike(chained, wanted)
    assert nothing is None
    assert torch.allclose(said[: len(X)], answers, rtol=1e-5, atol=1e-6)


def test_weights_alone_are_complete(tmp_path: Path) -> None:
    wanted, answers = trained(tmp_path / "run")

    with made(seed=1) as trainer:
        trainer.load(tmp_path / "run")
        trainer.step(X, X)
        trainer.export(tmp_path / "weights")
    with made(seed=2) as trainer:
        trainer.load(tmp_path / "weights")
        found = state(trainer)

    for name in UNUSED:
        assert torch.equal(found[name], wanted[name])


def nothing(*given: Any) -> list[Any]:
    return []


def no_values() -> nn.Module:
    with torch.device("meta"):
        return WithMore()


@pytest.mark.parametrize("without", ["older", "meta"])
def test_what_a_checkpoint_does_not_have_is_named(
    without: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version; and values that nothing can make."""
    with monkeypatch.context() as older:
        if without == "older":
            older.setattr(Unused, "pieces", nothing)
        model = WithMore() if without == "older" else no_values()
        with made(model=model) as trainer:
            trainer.step(X, X)
            trainer.save(tmp_path / "run")

    with made() as trainer:
        trainer.resume(tmp_path / "run")

    assert "the checkpoint does not have" in caplog.text
    assert "prior" in caplog.text


def test_load_takes_what_is_chosen_and_renamed_of_a_checkpoint(tmp_path: Path) -> None:
    wanted, _ = trained(tmp_path / "run")
    with made(seed=1) as trainer:
        before = state(trainer)
        trainer.load(tmp_path / "run", only=lambda name: name in ("unused", "a.weight", "b.weight"))
        chosen = state(trainer)
    with made(seed=1) as trainer:
        trainer.load(tmp_path / "run", rename=lambda name: SWAPPED.get(name, name))
        swapped = state(trainer)

    assert torch.equal(chosen["unused"], wanted["unused"])
    assert not torch.equal(chosen["a.weight"], before["a.weight"])
    for name in ("prior", "mean", "head.weight", "norm.bias"):
        assert torch.equal(chosen[name], before[name])
    assert torch.equal(swapped["prior"], wanted["unused"])
    assert torch.equal(swapped["unused"], wanted["prior"])


def test_tables_that_are_not_saved_are_those_of_the_model(tmp_path: Path) -> None:
    """A buffer that the step uses, and that is not in the state dict: rotary frequencies."""
    for table in (2.0, 3.0):
        x = torch.ones(2, 4)
        given: dict[str, Any] = {"example": (x, x), "device": "cpu", "optimizer": SGD}
        with Trainer(Tabled(table), nn.functional.mse_loss, **given) as trainer:
            if (tmp_path / "run").exists():
                trainer.load(tmp_path / "run")
            loss = trainer.step(x, x).loss
            trainer.save(tmp_path / "run")

    weight = torch.ones(4, requires_grad=True)
    (weight * 2.0 - 1).pow(2).mean().backward()
    assert weight.grad is not None
    weight = (weight - 0.1 * weight.grad).detach()
    assert loss == pytest.approx(float((weight * 3.0 - 1).pow(2).mean()))


class Late(nn.Module):
    """Its loop switches a layer on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late = nn.Linear(4, 4), nn.Linear(4, 4)
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.first(x)
        return self.late(found) if self.on else found


def plain_losses(batches: list[torch.Tensor]) -> list[float]:
    model = Late()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for step, x in enumerate(batches):
        model.on = step >= 2
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_layer_that_comes_into_use_goes_on_with_a_new_trainer(tmp_path: Path) -> None:
    batches = [torch.randn(4, 4, generator=torch.Generator().manual_seed(k)) for k in range(5)]
    optimizer = partial(torch.optim.AdamW, lr=0.1)
    given: dict[str, Any] = {"example": (X, X), "device": "cpu", "optimizer": optimizer}
    old, new = Late(), Late()
    with Trainer(old, nn.functional.mse_loss, ONE, **given) as trainer:
        losses = [float(trainer.step(x, x).loss) for x in batches[:2]]
        old.on = new.on = True
        with pytest.raises(InputError, match="which no step before has used") as refused:
            trainer.step(batches[2], batches[2])
        assert "late.bias and late.weight" in str(refused.value)
        trainer.save(tmp_path / "run")
    with Trainer(new, nn.functional.mse_loss, ONE, **given) as trainer:
        trainer.resume(tmp_path / "run")
        losses += [float(trainer.step(x, x).loss) for x in batches[2:]]

    torch.testing.assert_close(losses, plain_losses(batches), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["resume", "load"])
def test_what_was_evaluated_before_is_evaluated_anew(how: str, tmp_path: Path) -> None:
    """A baseline, and then a run goes on: what only evaluation uses is that of the run."""
    _, answers = trained(tmp_path / "run")
    with made(seed=1) as trainer:
        before = trainer.predict(X), trainer.evaluate([(X, X)]).loss
        getattr(trainer, how)(tmp_path / "run")
        if how == "resume":
            trainer.step(X, X)
        after = trainer.predict(X), trainer.evaluate([(X, X)]).loss
        model = WithMore(2)
        model.load_state_dict(state(trainer))

    with torch.no_grad():
        wanted = model.eval()(X)
    torch.testing.assert_close(after[0], wanted)
    assert after[1] == pytest.approx(nn.functional.mse_loss(wanted, X).item(), rel=1e-5)
    assert not torch.allclose(before[0], after[0])
    assert how == "load" or torch.allclose(after[0], answers, rtol=1e-5, atol=1e-6)


def filled(name: str, tensor: torch.Tensor) -> None:
    tensor.fill_(len(name))


@pytest.mark.parametrize("start", ["step", "resume", "load"])
def test_a_model_on_meta_has_a_whole_state_dict(start: str, tmp_path: Path) -> None:
    wanted, _ = trained(tmp_path / "run")
    given: dict[str, Any] = {"example": (X, X), "device": "cpu", "init": filled}
    loss_fn, optimizer = nn.functional.mse_loss, torch.optim.Adam
    with Trainer(no_values(), loss_fn, optimizer=optimizer, **given) as trainer:
        trainer.step(X, X) if start == "step" else getattr(trainer, start)(tmp_path / "run")
        found = state(trainer)
        trainer.export(tmp_path / "weights")

    assert not any(one.is_meta for one in found.values())
    for name in {"unused", "prior", "mean"}:
        same = torch.full((3,), float(len(name))) if start == "step" else wanted[name]
        assert torch.equal(found[name], same)


def test_a_tied_parameter_is_chosen_by_any_of_its_names(tmp_path: Path) -> None:
    wanted, _ = trained(tmp_path / "run")
    with made(seed=1) as trainer:
        trainer.load(tmp_path / "run", only=lambda name: name == "tail.weight")
        found = state(trainer)
        with pytest.raises(InputError, match="no tensor was chosen"):
            trainer.load(tmp_path / "run", only=lambda name: False)

    assert torch.equal(found["head.weight"], wanted["head.weight"])
    assert not torch.equal(found["unused"], wanted["unused"])


def test_a_run_that_is_asked_to_stop_keeps_its_older_checkpoints(tmp_path: Path) -> None:
    request = StopRequest()
    request.agreed, request.folder = True, str(tmp_path / "run")
    with made() as trainer:
        for _ in range(2):
            trainer.step(X, X)
            trainer.save(tmp_path / "run", keep=5)
        trainer.step(X, X)
        with pytest.raises(SystemExit):
            request.leave(trainer)

    assert [one.steps for one in kept_in(tmp_path / "run")] == [1, 2, 3]


def test_a_load_that_finds_nothing_says_what_it_looked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "run")
    with made(seed=1) as trainer:
        with pytest.raises(InputError, match="has no tensor of the model") as refused:
            trainer.load(tmp_path / "run", rename=lambda name: f"model.{name}", strict=False)
        assert "(model.unused in the files) is missing" in str(refused.value)
        assert "into names in the files, such as unused" in str(refused.value)
        trainer.load(tmp_path / "run", rename=lambda n: n.replace("prior", "x"), strict=False)

    assert "prior (x in the files) is missing; prior is unknown" in caplog.text


def test_the_rate_is_that_of_a_parameter() -> None:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        empty: dict[str, Any] = {"params": [], "lr": 5.0}
        return torch.optim.SGD([empty, {"params": [one for _, one in named]}], lr=0.25)

    given: dict[str, Any] = {"example": (X, X), "device": "cpu", "optimizer": optimizer}
    with Trainer(WithMore(), nn.functional.mse_loss, **given) as trainer:
        assert trainer.step(X, X).lr == 0.25
