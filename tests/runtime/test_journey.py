"""In which order an exchange does what it does: on a GPU the host would wait for the rows, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from piper.runtime.comm.gloo import Journey
from piper.runtime.comm.nccl import CudaComm, CudaCourier, CudaJourney


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


@pytest.mark.parametrize("way", ["out", "back"])
def test_what_is_prepared_on_a_gpu_gives_the_same_rows(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything that needs a GPU left out: rows come back as they are sent."""

    splits: list[Any] = []

    def mirrored(into: torch.Tensor, given: torch.Tensor, *sizes: Any, group: Any) -> None:
        splits.append(sizes)
        into.copy_(given)

    monkeypatch.setattr(dist, "all_to_all_single", mirrored)
    got = torch.tensor([[1, 1], [3, 1]])
    sent = torch.tensor([[3, 0], [1, 2]])
    rows = (torch.randn(6, 2), torch.randn(6, 3))
    courier = object.__new__(CudaCourier)
    courier.looking = None  # type: ignore[assignment]
    comm = CudaComm(groups={"team": None}, couriers={"team": courier})  # type: ignore[dict-item]

    prepared = comm.journey(rows, (sent, got), way, "team")  # type: ignore[arg-type]
    assert isinstance(prepared, CudaJourney)
    prepared.prepare()
    found = prepared()

    wanted = Journey(rows, (sent, got), way, None)()
    assert [one.shape for one in found] == [(6, 2), (6, 3)]
    assert all(map(torch.equal, found, wanted))
    assert splits[:2] == splits[2:], "as many to each device, and from each, as without a GPU"
    assert not torch.equal(found[0], rows[0]), "nothing was sorted"
