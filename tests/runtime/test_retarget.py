"""A run that changes its strategy between steps computes what plain PyTorch computes."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from checkpoints import HALVING, MOMENTUM, Branches, alone, retarget_often, weights
from draws import every
from pool import run_on
from replicas import compare, data, plain
from torch import nn
from torch.nn import functional

from piper import Place, Replicate, Split, Strategy, Trainer, where
from piper.errors import InputError, PiperError
from piper.strategies import BUILDERS

STEPS = 3


def build(schedule: str, **options: Any) -> Strategy:
    return BUILDERS[schedule](**options)


def replicated(world: int, zero: int, microbatches: int) -> Strategy:
    devices = list(range(world))
    copies = Replicate(where(), devices, zero=zero)
    return Strategy([Place(where(), devices), copies, Split("MB", microbatches)])


TWO = {
    "copies": replicated(2, 0, 2),
    "zero 1": replicated(2, 1, 1),
    "zero 3": replicated(2, 3, 2),
    "1f1b": build("1f1b", pp=2, microbatches=4),
    "gpipe": build("gpipe", pp=2, microbatches=2),
    "zero bubble": build("zb-h1", pp=2, microbatches=4),
}
EXPERTS = {"experts": build("1f1b", pp=1, microbatches=2, dp=2, ep=2, zero=1)}
DIVIDED = {
    "tensor": build("1f1b", pp=1, microbatches=4, tp=2),
    "remat": build("1f1b", pp=2, microbatches=4, remat=True),
}
FOUR = {
    "copies": replicated(4, 0, 1),
    "zero 2": replicated(4, 2, 1),
    "1f1b": build("1f1b", pp=2, microbatches=2, dp=2, zero=3),
    "hybrid": Strategy([
        Place(where(), [0, 1, 2, 3]), Replicate(where(), [[0, 1], [2, 3]], zero=3),
        Split("MB", 1),
    ]),
}  # fmt: skip
FOUR_DIVIDED = {
    "tensor 4": build("1f1b", pp=1, microbatches=4, tp=4),
    "tensor 2": build("1f1b", pp=1, microbatches=2, tp=2, dp=2, zero=3),
    "stages": build("1f1b", pp=2, microbatches=2, tp=2),
}
THREE = {
    "copies": Strategy([
        Place(where(PP=0), [0, 1]), Replicate(where(PP=0), [0, 1]), Place(where(PP=1), [2]),
        Split("MB", 2),
    ]),
    "shards": Strategy([
        Place(where(PP=0), [2]), Place(where(PP=1), [1, 0]),
        Replicate(where(PP=1), [1, 0], zero=2), Split("MB", 2),
    ]),
    "one does all": Strategy([
        Place(where(PP=0), [1]), Place(where(PP=1), [0, 2]), Replicate(where(PP=1), [0, 2], zero=3),
        Split("MB", 1),
    ]),
}  # fmt: skip
CASES: dict[str, tuple[str, int, dict[str, Strategy]]] = {
    "uneven": ("uneven", 2, TWO),
    "tied": ("llama", 2, TWO),
    "experts": ("moe spread", 2, {**TWO, **EXPERTS}),
    "divided": ("wide", 2, {**TWO, **DIVIDED}),
    "unequal, three": ("uneven", 3, THREE),
    "uneven, four": ("uneven", 4, FOUR),
    "divided, four": ("wide", 4, {**FOUR, **FOUR_DIVIDED}),
}


def goes_on(case: str, names: list[str]) -> None:
    model, world, known = CASES[case]
    texts = [known[name].to_json() for name in names]

    found = run_on(world, retarget_often, model, 2, texts)

    runs, reference = [run for run, _ in found], plain(model, 2, 8, 4)
    for run in runs:
        torch.testing.assert_close(run.loss, reference.loss, rtol=1e-12, atol=0.0, msg=str(names))
    compare([run.parameters for run in runs], reference.parameters, "parameter")
    for key, parts in reference.optimizer.items():
        compare([run.optimizer[key] for run in runs if key in run.optimizer], parts, key)
    for change in range(STEPS - 1):
        sent = {moved[change][0] for _, moved in found}
        missing = [moved[change][1:] for _, moved in found]
        steps = sum(counts for _, counts in missing)
        bytes_needed = 8 * (sum(every for every, _ in missing) - steps) + 4 * steps
        assert sent == {bytes_needed}, names


FEW = {
    "unequal, three": ["shards", "copies", "one does all"],
    "uneven": ["1f1b", "zero 3", "copies"],
    "divided": ["zero 1", "tensor", "remat"],
}


@pytest.mark.parametrize(("case", "names"), every(3, FEW.items(), FEW))
def test_losses_are_the_same_and_only_what_is_missing_moves(case: str, names: list[str]) -> None:
    goes_on(case, names)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(25))
def test_fifty_changes_between_random_strategies(seed: int) -> None:
    draw = random.Random(seed)
    case = list(CASES)[seed % len(CASES)]
    goes_on(case, draw.sample(list(CASES[case][2]), STEPS))


def test_microbatches_and_rates_go_on_in_one_process() -> None:
    options = {"optimizer": MOMENTUM, "lr_scheduler": HALVING}
    changed, whole = alone(**options), alone(**options)
    wanted = [whole.step(*batch).loss for batch in data()]

    found = []
    for parts, batch in zip((2, 4, 1), data(), strict=False):
        assert changed.retarget([Place(where(), [0]), Split("MB", parts)]) == 0
        found.append(changed.step(*batch).loss)

    torch.testing.assert_close(found, wanted[: len(found)], rtol=1e-12, atol=0.0)
    assert changed.steps == len(found)
    whole.close()
    changed.close()


def test_what_is_not_supported_changes_nothing() -> None:
    trainer, other = alone(), alone()
    before = weights(trainer)

    for wrong in ([Place(where(PP=7), [0])], [Place(where(), [0, 1])], [Split("MB", 3)]):
        with pytest.raises(PiperError):
            trainer.retarget(wrong)

    assert all(torch.equal(before[name], t) for name, t in weights(trainer).items())
    batch = data()[0]
    assert trainer.step(*batch).loss == other.step(*batch).loss
    trainer.close()
    other.close()


def test_parameters_that_the_example_does_not_use_stay() -> None:
    """They come back with their optimizer's state at the first batch that uses them."""
    long = data()[0]
    short = tuple(tensor[:4] for tensor in long)
    runs = []
    for changes in (False, True):
        trainer = Trainer(
            Branches(), functional.mse_loss, example=short, device="cpu", optimizer=MOMENTUM
        )
        losses = []
        for batch in (short, long, short, long, long):
            if changes:
                trainer.retarget([Place(where(), [0])])
            losses.append(trainer.step(*batch).loss)
        runs.append((losses, weights(trainer)))
        trainer.close()

    (wanted, theirs), (found, ours) = runs
    assert found == wanted
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_loss_scale_goes_on() -> None:
    x, y = (tensor.float() for tensor in data()[0])
    trainer = Trainer(
        nn.Sequential(nn.Linear(6, 6)), functional.mse_loss, example=(x, y), device="cpu",
        precision="fp16",
    )  # fmt: skip
    scale = trainer._programs.state.loss_scale
    assert scale is not None
    scale.value = 64.0
    trainer.step(x, y)
    trainer.retarget([Place(where(), [0]), Split("MB", 2)])

    after = trainer._programs.state.loss_scale
    assert after is not None
    assert (after.value, after.good) == (64.0, 1)
    trainer.close()


def test_it_says_what_moved(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="piper")
    trainer = alone()
    trainer.retarget([Place(where(), [0])])
    trainer.close()

    assert "another strategy: 0 bytes moved between devices" in caplog.messages


def test_rows_that_replicas_do_not_divide_are_refused() -> None:
    from piper.directives import Split
    from piper.ir.placement.replicas import replicas
    from piper.job.batch.batch import Batch
    from piper.job.batch.replica_batches import ReplicaBatches
    from piper.job.programs.retarget import resized

    one, two, three = (
        ReplicaBatches(Split("MB", 1), replicas([range(n)])) for n in (1, 2, 3)
    )  # fmt: skip
    example = Batch.of((torch.ones(5, 2), torch.tensor(1.0)))
    assert [tuple(t.shape) for t in resized(example, two, one).tensors] == [(10, 2), ()]
    with pytest.raises(InputError, match="3 replicas, which do not divide 10 rows"):
        resized(example, two, three)
