"""`cp` with a model whose tokens are no dimension of its input: rows may be divided instead."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from draws import every
from torch import Tensor, nn
from torch.nn import functional

import piper
from piper.job.batch.batch import Batch
from piper.job.job import Job
from piper.job.numerics import compare
from piper.job.options import Options

DIM, HEADS = 8, 2


class Patches(nn.Module):
    """Patches of an image attend to each other, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 2, stride=2)
        self.near = nn.Conv1d(DIM, DIM, 3, padding=1, groups=DIM)
        self.up = nn.ConvTranspose1d(DIM, DIM, 2, stride=2)
        self.qkv, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        rows, tokens, _ = x.shape
        split = self.qkv(x).view(rows, tokens, 3, HEADS, DIM // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = (x + mixed.transpose(1, 2).reshape(x.shape)).transpose(1, 2)
        return self.head(self.up(self.near(x)).mean(2))


def lines(caplog: Any, rows: int, **given: Any) -> list[str]:
    torch.manual_seed(0)
    strategy = piper.strategies.one_f_one_b(pp=1, microbatches=2, cp=2, **given)
    job = Job(Patches().double(), functional.cross_entropy, strategy, Options(device="cpu"))
    batch = Batch.of((torch.randn(2 * rows, 3, 4, 4).double(), torch.arange(2 * rows) % 5))
    with caplog.at_level(logging.INFO, "piper"):
        captured, compiled = job.compile(batch)
    found = compare(job, batch, captured, compiled)
    assert found.agrees, (found.steps, found.wrong)
    return [line for line in caplog.messages if "divided by rows" in line]


@pytest.mark.soak
def test_rows_that_are_divided_instead_of_tokens_are_said(caplog) -> None:
    (line,) = lines(caplog, rows=2)

    assert not [one for one in caplog.messages if one.startswith("not divided")]
    assert line.startswith("divided by rows, not by tokens, as that sends less: scaled_dot_product")
    assert line.endswith(
        "`piper show` lists what is sent before and behind; to divide tokens, write "
        'attention="ring" (cp_attention="ring" in a builder), or give each microbatch fewer rows '
        "than devices"
    )


@pytest.mark.parametrize("given", every(2, [{"rows": 1}, {"rows": 2, "cp_attention": "ring"}]))
def test_tokens_are_divided_where_it_says_so(caplog, given: dict[str, Any]) -> None:
    assert lines(caplog, **given) == []
