"""Ring attention under strategies, in threads, against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from dense_net import STRATEGIES, agree, run
from draws import one_of
from torch import nn
from torch.nn import functional

from piper import Place, Shard, Strategy, rehearse, strategies, where
from piper.errors import CaptureError, Refused, StrategyError

SOAK = pytest.mark.soak
KINDS = ("ring", "zigzag")
RING = Strategy([Place(where(), [0, 1]), Shard(where(), [0, 1], what="tokens", attention="ring")])
DEFAULT = {("zb-h1", "ring")}
EVERY = [
    pytest.param(name, kind, marks=() if (name, kind) in DEFAULT else SOAK)
    for name in STRATEGIES
    for kind in KINDS
]


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_ring_trains_as_plain_pytorch_under_every_schedule(name: str, kind: str) -> None:
    agree(run(STRATEGIES[name](cp=2, cp_attention=kind)))


@SOAK
@pytest.mark.parametrize("remat", [True, "attention", "matmuls", 0.5])
def test_a_ring_is_recomputed(remat) -> None:
    agree(run(STRATEGIES["1f1b"](cp=2, cp_attention="zigzag", remat=remat)))


@SOAK
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_of_heads_that_are_divided_by_weights(kind: str) -> None:
    agree(run(STRATEGIES["zb-h1"](cp=2, tp=2, cp_attention=kind)))


@SOAK
def test_a_ring_of_four() -> None:
    agree(run(STRATEGIES["dualpipev"](cp=4, cp_attention="ring")))


def test_tokens_that_do_not_divide_are_refused() -> None:
    with pytest.raises(CaptureError) as error:
        run(STRATEGIES["dualpipev"](cp=4, cp_attention="zigzag"))

    (problem,) = error.value.problems
    assert problem.what == (
        'attention="zigzag" is not possible for any attention of the model: its 4 tokens cannot be '
        "cut in 8 equal parts"
    )
    assert problem.fix.startswith("leave out attention= (cp_attention= of a schedule), and")


@one_of(2)
@pytest.mark.parametrize("dropout", [0.5, None])
def test_a_model_without_an_attention_that_can_be_a_ring_is_refused(dropout: float | None) -> None:
    net = nn.Linear(4, 4) if dropout is None else nn.TransformerEncoderLayer(4, 2, 4, dropout)
    x = torch.zeros(2, 4, 4)

    with pytest.raises(CaptureError) as error:
        rehearse(net, functional.mse_loss, RING, [(x, x)])

    (problem,) = error.value.problems
    assert problem.what.endswith(
        "it does not call scaled_dot_product_attention, or only with dropout of scores"
    )


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"what": "tokens", "attention": "rings"}, "attention='rings' is not known"),
        (
            {"what": "weights", "attention": "ring"},
            'attention="ring" is about tokens, and weights are divided',
        ),
    ],
)
def test_a_ring_is_of_tokens(given: dict, what: str) -> None:
    with pytest.raises(Refused) as error:
        Shard(where(), [0, 1], **given)

    assert [problem.what for problem in error.value.problems] == [what]


def test_a_ring_has_more_than_one_device() -> None:
    with pytest.raises(StrategyError, match='cp_attention="ring" has no effect with cp=1'):
        strategies.gpipe(pp=2, microbatches=2, cp_attention="ring")
