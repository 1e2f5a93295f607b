"""Marks on a model: by hand or by module path, and none of them outside of capture."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from capture.interpreter import assert_parity
from torch import Tensor, nn

from piper.capture import annotate, capture, tag
from piper.errors import CaptureError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x).square().mean()


def test_annotate_does_nothing_outside_of_capture() -> None:
    assert isinstance(annotate("PP"), nullcontext)


def test_modules_are_tagged_by_path() -> None:
    model = Net()
    tag(model, "PP", [["embed", "layers.0"], ["layers.1", "head"]])

    captured = capture(model, None, (torch.randn(4, 8),))

    assert [region.id for region in captured.model.regions] == ["PP0", "PP1"]
    assert [p.name for p in captured.model.buckets["PP1"].parameters] == [
        "head.weight",
        "head.bias",
        "layers.1.weight",
        "layers.1.bias",
    ]
    assert_parity(captured, model, None, (torch.randn(4, 8),))


def test_tagging_leaves_the_model_as_it_is() -> None:
    model = Net()
    tag(model, "PP", [["embed"], ["head"]])

    assert not any(module._forward_hooks for module in model.modules())
    assert model.state_dict().keys() == Net().state_dict().keys()


def test_tags_of_two_names_nest() -> None:
    model = nn.Sequential(Net())
    tag(model, "PP", [["0"]])
    tag(model, "EP", [["0.layers.0"], ["0.layers.1"]])

    captured = capture(model, None, (torch.randn(4, 8),))

    ids = [region.id for region in captured.model.regions]
    assert ids == ["PP0", "PP0.EP0", "PP0#1", "PP0.EP1", "PP0#2"]


def test_regions_know_the_line_they_begin_at() -> None:
    model = Net()
    tag(model, "PP", [["embed", "layers.0"], ["layers.1", "head"]])

    regions = capture(model, None, (torch.randn(4, 8),)).model.regions

    code = Net.forward.__code__.co_firstlineno
    assert [region.source for region in regions] == [
        f"test_tags.py:{code + 1}",
        f"test_tags.py:{code + 3}",
    ]


class Loop(nn.Module):
    """One layer that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.layer(x).tanh()
        return x.square().mean()


def test_calls_of_one_module_go_to_its_groups_in_turn() -> None:
    model = Loop()
    tag(model, "L", [["layer"], ["layer"], ["layer"]])

    captured = capture(model, None, (torch.randn(4, 8),))

    assert [region.id for region in captured.model.regions] == ["L0", "L1", "L2"]
    assert_parity(captured, model, None, (torch.randn(4, 8),))


class Failing(nn.Module):
    """Fails in the middle of a region, as a model that cannot be captured does."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside, self.layers = inside, nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        block = annotate("L", 0)
        block.__enter__()  # never left
        if self.inside:
            torch.utils.checkpoint.checkpoint(self.fail, x, use_reentrant=False)
        return self.fail(self.layers[0](x))

    def fail(self, x: Tensor) -> Tensor:
        raise ValueError("on purpose")


@pytest.mark.parametrize("inside", [False, True])
def test_a_capture_that_fails_leaves_no_marks_for_the_next(inside: bool) -> None:
    example = (torch.randn(4, 8),)
    model = Net()
    tag(model, "PP", [["layers.0"], ["layers.1"]])
    before = [region.id for region in capture(model, None, example).model.regions]

    with pytest.raises(ValueError, match="on purpose"):
        capture(Failing(inside), None, example)

    assert [region.id for region in capture(model, None, example).model.regions] == before


@pytest.mark.parametrize("groups", ["0", ["0", "1"], [["0"], "1"]])
def test_a_path_in_place_of_a_list_is_refused_once(groups: Any) -> None:
    with pytest.raises(CaptureError, match=r'write \[\["[01]"\]') as refused:
        tag(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), "PP", groups)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    "wrong",
    [lambda: annotate(PP=0), lambda: annotate("PP=0"), lambda: annotate("PP", PP=0), annotate],
)
def test_a_region_is_not_named_like_a_filter(wrong: Any) -> None:
    with pytest.raises(CaptureError, match=r'write annotate\("PP"\).*annotate\("PP", 0\)'):
        wrong()
