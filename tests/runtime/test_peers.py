"""Where PyTorch's composition of pipelines and data parallelism is silently wrong, Piper is right.

These document the peer as it is: no exception, no warning, another gradient. Should one of them
start to fail, PyTorch has been repaired, and facts about it in the pages must be, too.
"""

from functools import partial

import pytest
import torch
from draws import every
from peer_jobs import PARTS, Stages, half, peer, plain_gradients, whole_batch
from pool import run_on

from piper import rehearse
from piper.strategies import BUILDERS

CASES = [
    ("InterleavedZeroBubble", "interleaved-zb", "fsdp2", 3),
    ("ZBVZeroBubble", "zbv", "fsdp2", 3),
    ("DualPipeV", "dualpipev", "fsdp2", 3),
    ("ZBVZeroBubble", "zbv", "ddp", 0),
]
AS_MEASURED = torch.__version__.startswith("2.13")


@pytest.mark.skipif(not AS_MEASURED, reason="measured with torch 2.13")
@pytest.mark.parametrize(("theirs", "ours", "wrap", "zero"), every(6, CASES))
def test_gradients_that_the_peer_loses_are_right_here(
    theirs: str, ours: str, wrap: str, zero: int
) -> None:
    found = run_on(4, peer, theirs, wrap)
    wrong = [missing > 0 or error > 0.01 for missing, error in found]
    assert any(wrong), f"the peer is right: {found}"

    assert worst_error(ours, zero) < 1e-6


@pytest.mark.skipif(not AS_MEASURED, reason="measured with torch 2.13")
def test_the_comparison_itself_is_fair_where_both_are_right() -> None:
    found = run_on(4, peer, "Interleaved1F1B", "fsdp2")

    assert all(missing == 0 and error < 1e-6 for missing, error in found)
    assert worst_error("interleaved-1f1b", 3) < 1e-6


def worst_error(schedule: str, zero: int) -> float:
    """Of gradients: what one step of plain descent takes away."""
    strategy = BUILDERS[schedule](pp=2, microbatches=PARTS, dp=2, zero=zero)
    before = dict(Stages().named_parameters())
    descent = partial(torch.optim.SGD, lr=1.0)

    result = rehearse(Stages(), half, strategy, [whole_batch()], optimizer=descent, reduction="sum")

    wanted = plain_gradients()
    found = {name: before[name].detach() - new for name, new in result.parameters.items()}
    return max(float((found[n] - g).norm() / g.norm()) for n, g in wanted.items())
