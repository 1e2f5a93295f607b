"""The order of a token all-to-all's steps. On a GPU, the host must not wait for rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from piper.runtime.comm.gloo import TokenAllToAll
from piper.runtime.comm.nccl import CudaComm, CudaExchangeThread, CudaTokenAllToAll


class Noted(TokenAllToAll):
    """Notes when counts are copied to where kernels read them."""

    def counts_on_device(self, got: torch.Tensor) -> torch.Tensor:
        SEEN.append("counts here")
        return super().counts_on_device(got)


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

    assert SEEN == ["counts", "counts here", "rows"]
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
    thread = object.__new__(CudaExchangeThread)
    thread.counts_stream = None  # type: ignore[assignment]
    comm = CudaComm(groups={"team": None}, threads={"team": thread})  # type: ignore[dict-item]

    prepared = comm.all_to_all(rows, (sent, got), way, "team")  # type: ignore[arg-type]
    assert isinstance(prepared, CudaTokenAllToAll)
    prepared.prepare()
    found = prepared()

    wanted = TokenAllToAll(rows, (sent, got), way, None)()
    assert [one.shape for one in found] == [(6, 2), (6, 3)]
    assert all(map(torch.equal, found, wanted))
    assert splits[:2] == splits[2:], "as many to each device, and from each, as without a GPU"
    assert not torch.equal(found[0], rows[0]), "nothing was sorted"
