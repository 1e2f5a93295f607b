"""What the log says when one more program is compiled."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

import piper
from piper.job.job import Job
from piper.job.options import Options
from piper.job.programs.new_program import FEWER, new_program_lines


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.embedding(tokens).sum(-1) * mask


def job(most: int = 64) -> Job:
    strategy = piper.strategies.one_f_one_b(pp=1, microbatches=1)
    return Job(Reader(), nn.functional.mse_loss, strategy, Options(max_programs=most, device="cpu"))


def said(
    *lengths: int, modes: tuple[bool, ...] = (), labels: torch.dtype = torch.float32
) -> list[list[str]]:
    """The lines of each program. `labels`: the type of the last ones."""
    made, found, before = job(9), list[list[str]](), []
    for k, length in enumerate(lengths):
        made.model.train(modes[k] if modes else True)
        row = torch.zeros(2, length)
        given = row if k < len(lengths) - 1 else row.to(labels)
        batch = made.example((row.long(), torch.ones(2, 1), given))
        kind = made.kind(batch)
        found.append(list(new_program_lines(made, batch, kind, before)))
        before.append(kind)
    return found


def test_a_new_length_is_named_with_its_inputs() -> None:
    assert said(3, 5) == [
        [], ["compiling program 2 (limit 9) for a new batch shape: tokens [2, 5], labels [2, 5]"]
    ]  # fmt: skip


def test_of_known_shapes_the_new_type_is_named() -> None:
    assert said(3, 5, 3, labels=torch.float64)[2] == [
        "compiling program 3 (limit 9) for a new batch type: labels in float64"
    ]


def test_many_lengths_get_a_hint_once() -> None:
    found = said(3, 4, 5, 6, 7, 8)
    assert [FEWER in lines for lines in found] == [False] * 4 + [True, False]


def test_another_mode_is_no_new_shape() -> None:
    assert said(3, 3, modes=(True, False))[1] == [
        "compiling program 2 (limit 9) because train(), eval() or requires_grad have changed"
    ]


def test_a_trainer_says_it(caplog) -> None:
    trainer = piper.Trainer(
        Reader(), nn.functional.mse_loss, piper.strategies.one_f_one_b(pp=1, microbatches=1),
        example=(torch.zeros(2, 3).long(), torch.ones(2, 1), torch.zeros(2, 3)), device="cpu",
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "piper"):
        for length in (3, 5, 3):
            row = torch.zeros(2, length)
            trainer.step(row.long(), torch.ones(2, 1), row)
    trainer.close()

    lines = [line for line in caplog.messages if "limit" in line]
    assert lines == [
        "compiling program 2 (limit 64) for a new batch shape: tokens [2, 5], labels [2, 5]"
    ]
