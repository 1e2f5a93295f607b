"""float16: every strategy trains as a plain loop with torch's GradScaler."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import every, one_of
from mixed_precision import batches, build, captured
from runtime.test_replicate import legal, stages_of
from shared_capture import using
from torch import Tensor, nn

from piper import LossScale, Offload, Place, Precision, Split, Strategy, Trainer, rehearse, where
from piper.errors import InputError
from piper.job.programs.rehearsal import Rehearsal
from piper.runtime.state.loss_scale import DynamicLossScale

# It overflows at first, backs off, grows again, and overflows again.
EVERY_OTHER = Precision(compute="fp16", loss_scale=LossScale(init=2.0**19, interval=2))
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4)


@dataclass
class ByHand:
    """The results of the loop."""

    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    masters: dict[str, Tensor] = field(default_factory=dict)


@cache
def steps_of(name: str, parts: int) -> list[tuple[Tensor, Tensor]]:
    """The same few batches several times, so that the scale has time to change."""
    return [*batches(name, parts), *batches(name, parts)]


@cache
def by_hand(
    model_name: str, stages: int, precision: Precision, parts: int, max_norm: float | None
) -> ByHand:
    """A plain loop with masters. `GradScaler` scales, unscales, skips and changes the scale."""
    model, loss_fn = build(model_name, stages)
    how, result = precision.loss_scale, ByHand()
    assert how is not None
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=how.init, growth_factor=how.growth, backoff_factor=how.backoff,
        growth_interval=how.interval,
    )  # fmt: skip
    named = dict(model.named_parameters())
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in named.items() if p.requires_grad}
    frozen = {n: p.detach().half() for n, p in named.items() if n not in masters}
    optimizer = ADAMW(list(masters.values()))
    for x, y in steps_of(model_name, parts):
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            copies = {n: m.detach().half().requires_grad_() for n, m in masters.items()}
            given = a.half() if a.is_floating_point() else a
            found = torch.func.functional_call(model, {**frozen, **copies}, (given,))
            scaler.scale(loss_fn(found.float(), b) / parts).backward()
            for name, copy in copies.items():
                if copy.grad is not None:
                    grad, old = copy.grad.float(), masters[name].grad
                    masters[name].grad = grad if old is None else old + grad
        scaler.unscale_(optimizer)
        grads = [m.grad for m in masters.values() if m.grad is not None]
        norm = torch.stack([grad.double().norm() for grad in grads]).norm()
        result.norms.append(norm.item())
        result.skipped.append(not torch.isfinite(norm))
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(masters.values(), max_norm, norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    result.masters = {name: master.detach() for name, master in masters.items()}
    return result


def run(name: str, strategy: Strategy, precision: Precision, max_norm: float | None) -> Rehearsal:
    stages, parts = max(stages_of(strategy), 2), 2 * strategy.microbatches
    model, loss, known = captured(name, stages, precision)
    with using(known):
        return rehearse(
            model, loss, strategy, steps_of(name, parts), optimizer=ADAMW, precision=precision,
            max_norm=max_norm,
        )  # fmt: skip


def assert_as_by_hand(found: Rehearsal, wanted: ByHand, tolerance: float = 2e-3) -> None:
    """float16 has 3 digits, and sums over replicas go in another order."""
    for norm, right, skipped in zip(found.grad_norms, wanted.norms, wanted.skipped, strict=True):
        assert skipped != torch.isfinite(torch.tensor(norm)).item()
        assert skipped or norm == pytest.approx(right, rel=tolerance)
    for name, master in wanted.masters.items():
        error = (found.parameters[name] - master).norm() / (master.norm() + 1e-30)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


CASES = every(2, [("1f1b", 0, None), ("zb-h1", 1, 0.05), ("zbv", 3, 0.05), ("gpipe", 2, None)])


@one_of(2)
@pytest.mark.parametrize(("schedule", "zero", "max_norm"), CASES)
def test_replicas_skip_and_scale_as_one_process_does(
    schedule: str, zero: int, max_norm: float | None
) -> None:
    strategy = legal(schedule, 2, dp=2, zero=zero)
    stages, parts = stages_of(strategy), 2 * strategy.microbatches

    found = run("uneven", strategy, EVERY_OTHER, max_norm)

    wanted = by_hand("uneven", stages, EVERY_OTHER, parts, max_norm)
    assert {True, False} <= set(wanted.skipped)
    assert_as_by_hand(found, wanted)


def test_optimizer_state_in_host_memory_survives_a_skipped_step() -> None:
    strategy = legal("1f1b", 2, dp=2, zero=1)

    found = run("uneven", strategy + Offload(where(), "optimizer"), EVERY_OTHER, None)

    kept = run("uneven", strategy, EVERY_OTHER, None)
    assert all(torch.equal(found.parameters[n], t) for n, t in kept.parameters.items())


@pytest.mark.parametrize("seed", range(5))
def test_the_scale_changes_as_that_of_torch(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    finite = (torch.rand(40, generator=draw) < 0.8).tolist()
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)
    ours = DynamicLossScale(2.0**120, 2.0, 0.5, 3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.0)

    for fine in finite:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = torch.ones(1) if fine else torch.full((1,), float("inf"))
        theirs.scale(torch.ones(()))
        theirs.step(optimizer)
        theirs.update()
        ours.finite = None
        ours.end(torch.tensor([0.0, 1.0 if fine else float("inf")], dtype=torch.float64))
        assert ours.value == theirs.get_scale()


def test_a_run_goes_on_with_its_scale(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": ADAMW, "device": "cpu", "precision": EVERY_OTHER}
    place = [Place(where(), [0]), Split("MB", 2)]
    data = steps_of("normed", 2)

    def trainer() -> closing[Trainer]:
        model, loss = build("normed", 2)
        return closing(Trainer(model, loss, place, example=data[0], **options))

    with trainer() as whole:
        wanted = [whole.step(*batch).grad_norm for batch in data]
    with trainer() as first:
        found = [first.step(*batch).grad_norm for batch in data[:3]]
        first.save(tmp_path / "run")
    with trainer() as second:
        second.resume(tmp_path / "run")
        found += [second.step(*batch).grad_norm for batch in data[3:]]

    assert str(found) == str(wanted)  # nan where it overflows
    assert not all(map(torch.isfinite, torch.tensor(wanted)))


def test_another_strategy_goes_on_with_the_scale_and_the_state() -> None:
    """To optimizer state in host memory, and back."""
    options: dict[str, Any] = {"optimizer": ADAMW, "device": "cpu", "precision": EVERY_OTHER}
    place = [Place(where(), [0]), Split("MB", 2)]
    data = steps_of("normed", 2)
    found = []

    for moves in (False, True):
        model, loss = build("normed", 2)
        with closing(Trainer(model, loss, place, example=data[0], **options)) as trainer:
            norms = [trainer.step(*batch).grad_norm for batch in data[:3]]
            if moves:
                trainer.retarget([*place, Offload(where(), "optimizer"), Offload(where())])
            norms += [trainer.step(*batch).grad_norm for batch in data[3:5]]
            if moves:
                trainer.retarget(place)
            norms += [trainer.step(*batch).grad_norm for batch in data[5:]]
            found.append((str(norms), trainer.state_dict()))

    (wanted, theirs), (norms, ours) = found
    assert norms == wanted
    assert theirs and ours and all(torch.equal(ours[name], t) for name, t in theirs.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"init": 0.0}, "init=0.0 of the loss scale"),
        ({"backoff": 2.0}, "grows by 2.0 and backs off by 2.0"),
        ({"interval": 0}, "interval=0 of the loss scale"),
    ],
)
def test_a_scale_that_makes_no_sense(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LossScale(**given)


def test_short_names() -> None:
    assert Precision(compute="fp16") == Precision(compute="half")
    assert Precision(compute="fp16").loss_scale == LossScale()
    assert Precision().loss_scale is None
