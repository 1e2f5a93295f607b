"""In which order an exchange does what it does: on a GPU the host would wait for the rows, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from piper.runtime.comm import Journey


class Noted(Journey):
    """Says when counts are put where kernels read them."""

    def shown(self, got: torch.Tensor) -> torch.Tensor:
        SEEN.append("shown")
        return super().shown(got)


SEEN: list[str] = []


def test_counts_are_there_before_rows_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(into: torch.Tensor, given: torch.Tensor, *_: Any, group: Any) -> None:
        SEEN.append("counts" if given.dtype == torch.int64 else "rows")
        into.copy_(given)

    monkeypatch.setattr(dist, "all_to_all_single", alone)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    SEEN.clear()
    rows, counts = torch.randn(3, 2), torch.tensor([1, 2])

    arrived, here, (sent, got) = Noted((rows,), counts, "counted", None)()

    assert SEEN == ["counts", "shown", "rows"]
    assert torch.equal(arrived, rows)
    assert here.tolist() == [1, 2] == sent.flatten().tolist() == got.flatten().tolist()
