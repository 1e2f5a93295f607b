"""Programs for shapes of batches are bounded, and what they have trained is not forgotten."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MOMENTUM, forgetful, weights
from pool import run_on
from replicas import data
from torch import nn
from torch.nn import functional

from piper import Trainer, annotate
from piper.errors import InputError


class Layers(nn.Module):
    """Batches with fewer rows use fewer layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in range(max(x.shape[0] - 3, 1)):
            with annotate("L", k):
                x = torch.tanh(self.layers[k](x))
        return x


def trained(max_programs: int, rows: list[int]) -> tuple[Trainer, list[float]]:
    full = data()[0]
    batches = [tuple(tensor[:count] for tensor in full) for count in rows]
    trainer = Trainer(
        Layers(), functional.mse_loss, example=batches[0], device="cpu", optimizer=MOMENTUM,
        max_programs=max_programs,
    )  # fmt: skip
    return trainer, [trainer.step(*batch).loss for batch in batches]


ROWS = [6, 4, 5, 4, 6, 5]


def test_losses_do_not_depend_on_how_many_programs_are_kept(tmp_path: Path) -> None:
    """Nor does a checkpoint: it has the parameters of all programs, also of forgotten ones."""
    many, wanted = trained(64, ROWS)
    few, found = trained(2, ROWS)

    assert found == wanted
    kept = few._programs
    assert max(map(len, (kept.ready, kept.assigned, kept.made, kept.job.captures))) == 2
    assert len(few._stepped) <= 3
    ours, theirs = weights(few), weights(many)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    few.save(tmp_path / "run")
    again = trained_from(tmp_path / "run")
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)
    many.close()
    few.close()


def trained_from(folder: Path) -> dict[str, torch.Tensor]:
    batch = tuple(tensor[:4] for tensor in data()[0])
    trainer = Trainer(
        Layers(), functional.mse_loss, example=batch, device="cpu", optimizer=MOMENTUM
    )
    assert trainer.resume(folder) == len(ROWS)
    found = weights(trainer)
    trainer.close()
    return found


def test_a_program_that_is_forgotten_is_gone() -> None:
    trainer, _ = trained(1, [4])
    programs = trainer._programs
    watched: list[Any] = [
        weakref.ref(next(iter(known.values()))) for known in (programs.ready, programs.made)
    ]

    trainer.step(*(tensor[:5] for tensor in data()[0]))
    gc.collect()

    assert [one() for one in watched] == [None, None]
    trainer.close()


def test_the_one_that_was_used_last_stays() -> None:
    trainer, _ = trained(2, [5, 4])
    for rows in (5, 6):
        trainer.step(*(tensor[:rows] for tensor in data()[0]))

    assert [kind[0][0][0][0] for kind in trainer._programs.ready] == [5, 6]
    trainer.close()


def test_processes_forget_the_same() -> None:
    """Kernels are sent again to a process that has forgotten them."""
    few, many = (run_on(2, forgetful, count, [4, 6, 4]) for count in (1, 64))

    assert few == many


@pytest.mark.parametrize("count", [0, -1, 2.5, True, "3"])
def test_a_count_is_a_count(count: Any) -> None:
    with pytest.raises(InputError, match="is not a count"):
        trained(count, [8])
