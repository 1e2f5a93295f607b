"""Whole models whose weights or tokens are divided, on processes, against plain PyTorch."""

from __future__ import annotations

import pytest
from pool import run_on
from replicas import assert_same, plain, train_all
from runtime.test_replicate import stages_of

from piper import strategies
from piper.directives import Strategy

PARTS = 4
ALONE = [
    strategies.one_f_one_b(pp=1, microbatches=2, tp=2, dp=2, zero=3),
    strategies.one_f_one_b(pp=1, microbatches=2, tp=2, dp=2, zero=0),
]
PIPELINES = [
    strategies.zb_h1(pp=2, microbatches=4, tp=2, zero=1),
    strategies.one_f_one_b(pp=2, microbatches=4, tp=2, zero=3),
]
TOKENS = [
    strategies.one_f_one_b(pp=1, microbatches=4, cp=4, zero=1),
    strategies.one_f_one_b(pp=1, microbatches=2, cp=2, dp=2, zero=3),
]
RINGS = [
    strategies.one_f_one_b(pp=1, microbatches=4, cp=4, cp_attention="zigzag", zero=1),
    strategies.one_f_one_b(pp=1, microbatches=2, cp=2, cp_attention="ring", dp=2, zero=3),
    strategies.one_f_one_b(pp=1, microbatches=4, cp=2, tp=2, cp_attention="zigzag"),
]
UNEQUAL = [
    strategies.one_f_one_b(pp=2, microbatches=2, dp=[1, 2], tp=2, zero=3),
    strategies.zb_h1(pp=2, microbatches=2, dp=[2, 1], cp=2, zero=1),
]


@pytest.mark.parametrize(
    "several",
    [ALONE, pytest.param(PIPELINES, marks=pytest.mark.soak),
     pytest.param(TOKENS, marks=pytest.mark.soak),
     *(pytest.param([ring], marks=pytest.mark.soak) for ring in RINGS)],
    ids=["alone", "pipelines", "tokens", "zigzag of four", "rings, zero=3", "zigzag, tp=2"],
)  # fmt: skip
def test_devices_that_divide_a_model_train_as_one(several: list[Strategy]) -> None:
    stages, texts = stages_of(several[0]), [strategy.to_json() for strategy in several]

    runs = run_on(4, train_all, "wide", stages, PARTS, texts, 0.5)

    for of_strategy in zip(*runs, strict=True):
        assert_same(of_strategy, plain("wide", stages, PARTS, PARTS, 0.5))


@pytest.mark.soak
def test_groups_that_compute_for_several_train_as_one() -> None:
    texts = [strategy.to_json() for strategy in UNEQUAL]

    runs = run_on(6, train_all, "wide", 2, PARTS, texts, 0.5)

    for of_strategy in zip(*runs, strict=True):
        assert_same(of_strategy, plain("wide", 2, PARTS, PARTS, 0.5))


EXPERTS = [
    strategies.one_f_one_b(pp=1, microbatches=2, tp=2, dp=2, ep=4, zero=1),
    strategies.one_f_one_b(pp=1, microbatches=2, cp=2, dp=2, ep=2, zero=3),
]


@pytest.mark.soak
@pytest.mark.parametrize("routing", ["skewed", "none"])
def test_experts_of_divided_stages_train_as_one(routing: str) -> None:
    texts = [strategy.to_json() for strategy in EXPERTS]

    runs = run_on(4, train_all, f"moe {routing}", 1, PARTS, texts, 0.5)

    for of_strategy in zip(*runs, strict=True):
        assert_same(of_strategy, plain(f"moe {routing}", 1, PARTS, PARTS, 0.5))
