"""What is read from the cache is what would have been traced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from capture.interpreter import assert_parity
from draws import every
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from piper.capture import Captured, annotate, capture
from piper.capture.cache.derivatives import derivatives
from piper.capture.cache.folder import CacheFolder
from piper.capture.graphs.phases import PhaseGraphs
from piper.capture.kernels import shipping
from piper.models.llama import Llama, LlamaConfig, cross_entropy
from piper.models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig, moe_loss
from piper.names import BI, BW, B, F


class Net(nn.Module):
    """Buffers that are updated, dropout, a checkpoint, channels that come last, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.last = nn.Linear(12, 1)
        self.table = torch.arange(12.0)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            y = self.norm(self.first(x.to(memory_format=torch.channels_last)))
        with annotate("PP"):
            y = checkpoint(torch.tanh, nn.functional.dropout(y, 0.5), use_reentrant=False)
            with torch.autocast("cpu", torch.bfloat16):
                z = self.last(y.flatten(1) + self.table)
            return z.float()


def mean(output: Tensor, labels: Tensor) -> Tensor:
    return ((output - labels) ** 2).mean()


def net() -> tuple[Any, ...]:
    return Net(), mean, (torch.randn(3, 2, 2, 2), torch.randn(3, 1))


def llama() -> tuple[Any, ...]:
    tokens = torch.randint(64, (2, 8))
    model = Llama(LlamaConfig(vocab=64, dim=16, heads=2, layers=3, kv_heads=1), stages=3)
    return model, cross_entropy, (tokens, tokens)


def experts() -> tuple[Any, ...]:
    tokens = torch.randint(64, (2, 8))
    return Qwen3Moe(Qwen3MoeConfig(vocab=64, layers=2), stages=2), moe_loss, (tokens, tokens)


def texts(captured: Captured) -> dict[str, dict[str, str]]:
    return {
        code: {phase: shipping.to_json(graph, described=True) for phase, graph in phases.items()}
        for code, phases in captured.kernels.graphs.items()
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPER_CACHE", str(tmp_path / "regions"))
    return tmp_path / "regions"


@pytest.mark.parametrize(("make", "read"), every(3, [(net, 2), (llama, 3), (experts, 5)]))
def test_a_hit_is_what_a_miss_is(folder: Path, make: Callable, read: int) -> None:
    model, loss_fn, batch = make()

    first = capture(model, loss_fn, batch)
    second = capture(model, loss_fn, batch)

    assert first.was_read == 0 and second.was_read == read
    assert second.model == first.model
    assert texts(second) == texts(first)


def test_only_graphs_that_are_asked_for_are_made_after_a_hit(folder: Path) -> None:
    capture(*net())
    found = capture(*net())
    (graphs, *_) = found.kernels.graphs.values()

    assert isinstance(graphs, PhaseGraphs) and list(graphs) == [F, B, BI, BW]
    assert not graphs.made
    assert graphs[B] is graphs[B] and list(graphs.made) == [B]


@pytest.mark.soak
def test_a_hit_computes_what_plain_pytorch_computes(folder: Path) -> None:
    model, loss_fn, batch = llama()
    capture(model, loss_fn, batch)

    captured = capture(model, loss_fn, batch)

    assert captured.was_read == 3
    assert_parity(captured, model, loss_fn, batch)


@pytest.mark.soak
def test_equal_regions_of_other_models_are_read(folder: Path) -> None:
    model, loss_fn, batch = llama()
    capture(model, loss_fn, batch)
    longer = Llama(LlamaConfig(vocab=64, dim=16, heads=2, layers=6, kv_heads=1), stages=6)

    captured = capture(longer, loss_fn, batch)

    assert captured.was_read == 3


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Captured]:
    """A folder that knows the net."""
    folder = tmp_path_factory.mktemp("known") / "regions"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPER_CACHE", str(folder))
        return folder, capture(*net())


WRONG: list[Callable[[dict[str, Any]], Any]] = [
    lambda found: found["graph"]["nodes"][-3].__setitem__(2, "ops.aten.from_file.default"),
    lambda found: found["graph"]["nodes"].pop(),
    lambda found: found["values"].pop(),
    lambda found: found["gradients"].pop(),
    lambda found: found["results"].append(0),
    lambda found: found["values"][0].__setitem__(3, [1, 1]),
    lambda found: found.__setitem__("arguments", 1),
    lambda found: found.clear(),
]


@pytest.mark.parametrize("change", every(4, WRONG))
def test_an_entry_that_somebody_else_wrote_is_ignored(
    folder: Path, known: tuple[Path, Captured], change: Callable[[dict[str, Any]], Any]
) -> None:
    shutil.copytree(known[0], folder)
    kept = CacheFolder(folder)
    for file in folder.iterdir():
        found = json.loads(kept.read(file.stem) or "")
        if "graph" in found:
            change(found)
            kept.write(file.stem, json.dumps(found))

    second = capture(*net())

    assert second.was_read == 0
    assert texts(second) == texts(known[1])


def test_without_a_folder_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPER_CACHE", "off")

    assert derivatives(None, "cpu").folder is None
