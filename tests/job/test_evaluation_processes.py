"""Evaluation and prediction in real processes."""

from __future__ import annotations

import pytest
import torch
from evaluations import Blocks, block_loss, close, evaluate_on, evaluate_unequally, held_out
from pool import run_on


def test_processes_evaluate_their_replicas_together() -> None:
    results = run_on(4, evaluate_on)

    losses = {loss for loss, *_ in results}
    *_, gathered, outputs, weights = results[0]
    assert len(losses) == 1 and {counts for _, counts, *_ in results} == {(22, 6)}
    assert all(one is other is None for *_, one, other, _ in results[1:])
    model = Blocks().double()
    model.load_state_dict(weights)
    model.eval()
    data = held_out()
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        assert losses.pop() == pytest.approx(block_loss(model(x), y).item(), rel=1e-12)
        close(outputs, model(data[1][0]))
    assert [one["replica"] for one in gathered] == [0, 1]
    torch.testing.assert_close(torch.cat([one["labels"] for one in gathered]), data[1][1])


@pytest.mark.parametrize("fewer", [0, 1])
def test_a_process_with_fewer_batches_is_named(fewer: int) -> None:
    message = (
        f"evaluate: device {fewer} gave fewer batches than device {1 - fewer}\n"
        "  fix: give every process the same number of batches"
    )

    assert run_on(2, evaluate_unequally, fewer) == [message] * 2
