"""Whole models: losses and gradients of several devices against plain autograd, in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from math import prod

import pytest
import torch
from capture.division.devices import Devices
from capture.division.models import (
    BATCH,
    TOKENS,
    VOCABULARY,
    Gpt,
    Unruly,
    batch,
    cross_entropy,
    drawn,
    llama,
    nll,
)  # fmt: skip
from capture.interpreter import Interpreter, eager, state
from draws import levels_of, one_of
from torch import Tensor, nn
from torch.nn import functional as F

from piper.capture import Captured, capture
from piper.capture.kernels.callables import Kernels
from piper.errors import CaptureError
from piper.ir.placement.division import DivisionRequest, What
from piper.ir.placement.placements import Cut, Invariant, Placement, Replicated, Step
from piper.ir.values import Role
from piper.view.reports.division import division

HIDDEN = BATCH * TOKENS * 16 * 8  # bytes of a hidden state of these models
WORDS = BATCH * TOKENS * VOCABULARY  # elements of whole logits


def divided(
    model: nn.Module, ways: int, what="weights", loss: Callable = cross_entropy, stages: int = 1,
    only: tuple[str, ...] | None = None, seeds: dict[str, Placement] | None = None,
) -> Captured:  # fmt: skip
    regions = only or tuple(f"PP{k}" for k in range(stages))
    if isinstance(model, Gpt | Unruly):
        regions = ("all",)
    request = DivisionRequest(regions=regions, ways=ways, what=what, seeds=seeds or {})
    return capture(model, loss, batch(), divide=[request])


def assert_exact(
    captured: Captured, model: nn.Module, ways: int, expected: tuple[Tensor, dict], **options
) -> Devices:
    received = Kernels()
    for split in (False, True):
        given = {"split": split, "received": received, **options}
        devices = Devices(captured, model, ways, given)
        loss, gradients = devices.step(batch())
        torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0)
        scale = max(float(gradient.abs().max()) for gradient in expected[1].values())
        torch.testing.assert_close(gradients, expected[1], rtol=0, atol=1e-12 * scale)
    return devices


def placements(captured: Captured) -> dict[str, Placement]:
    buckets = captured.model.buckets.values()
    return {p.name: p.placement for bucket in buckets for p in bucket.parameters}


def all_reduces(devices: Devices) -> float:
    """Bytes sent, in all-reduces of a hidden state."""
    return sum(devices.sent.values()) / (2 * HIDDEN * (devices.ways - 1) / devices.ways)


@cache
def tensor_parallel() -> tuple[nn.Module, Captured]:
    model = drawn(llama(stages=2, tied=True))
    return model, divided(model, 2, stages=2)


def test_tensor_parallelism_of_a_llama_sends_what_megatron_sends() -> None:
    model, captured = tensor_parallel()

    devices = assert_exact(captured, model, 2, eager(model, cross_entropy, batch()))

    layers, embedding, head = 2 * 4, 1, 1
    label = BATCH * TOKENS * 8 / HIDDEN  # of the loss: sums of exponentials, and the label's logit
    assert all_reduces(devices) - (layers + embedding + head) == pytest.approx(2 * label, abs=label)
    assert placements(captured)["embedding.weight"] == Cut(0)
    assert placements(captured)["blocks.1.attention.out.weight"] == Cut(1)
    assert placements(captured)["norm.weight"] == Replicated()


def has_whole_logits(captured: Captured) -> bool:
    """Whether any tensor of any phase, also inside a region, holds all words of all tokens."""
    graphs = (one.graph for phases in captured.kernels.graphs.values() for one in phases.values())
    found = (node.meta.get("val") for graph in graphs for node in graph.nodes)
    shapes = [tuple(one.shape) for one in found if isinstance(one, Tensor)]
    assert shapes
    return any(shape[-1:] == (VOCABULARY,) and prod(shape) >= WORDS for shape in shapes)


def test_no_device_has_whole_logits() -> None:
    model, captured = tensor_parallel()

    assert has_whole_logits(capture(model, cross_entropy, batch()))
    assert not has_whole_logits(captured)


def test_equal_layers_share_their_code() -> None:
    _, captured = tensor_parallel()

    pieces = [r for r in captured.model.regions if r.conversion is None]
    attention = [r for r in pieces if any("attention.out" in name for name in names(captured, r))]

    assert len(attention) == 2
    assert len({region.code for region in attention}) == 1


def names(captured: Captured, region) -> list[str]:
    return [p.name for b in region.buckets for p in captured.model.buckets[b].parameters]


def test_a_divided_model_has_local_shapes_and_conversions_between_its_pieces() -> None:
    _, captured = tensor_parallel()
    model = captured.model

    for region in model.regions:
        assert region.ways == 2
        assert region.tags in ((("PP", 0),), (("PP", 1),))
        if region.conversion:
            assert (len(region.inputs), len(region.outputs), region.buckets) == (1, 1, ())
        kinds = {model.buckets[bucket].placement for bucket in region.buckets}
        assert len(kinds) == len(region.buckets)
    assert model.values[model.loss].specs[0].shape == ()
    assert [v.specs[0].shape for v in model.values.values() if v.role is Role.RANK] == [()]
    tied = next(b for b in model.buckets.values() if b.parameters[0].name == "embedding.weight")
    assert tied.specs[0].shape == (VOCABULARY, 16)
    assert model.held(tied.id)[0].shape == (VOCABULARY // 2, 16)


@pytest.mark.soak
def test_grouped_heads_that_do_not_divide() -> None:
    model = drawn(llama(layers=1, kv_heads=2))
    captured = divided(model, 4)

    assert_exact(captured, model, 4, eager(model, cross_entropy, batch()))

    assert placements(captured)["blocks.0.attention.key.weight"] == Cut(0)


def test_context_parallelism_exchanges_heads() -> None:
    model = drawn(llama(layers=1))
    captured = divided(model, 4, "tokens")

    devices = assert_exact(captured, model, 4, eager(model, cross_entropy, batch()))

    each = HIDDEN / 4 * 3 / 4
    assert set(placements(captured).values()) == {Replicated()}
    assert devices.sent[Step.ALL_TO_ALL] == 8 * each  # q, k, v, out: there and back


@pytest.mark.soak
def test_context_parallelism_gathers_keys_and_values_if_heads_do_not_divide() -> None:
    model = drawn(llama(layers=1, heads=2))
    captured = divided(model, 4, "tokens")

    devices = assert_exact(captured, model, 4, eager(model, cross_entropy, batch()))

    assert devices.sent[Step.ALL_TO_ALL] == 0
    assert devices.sent[Step.ALL_GATHER] == 2 * HIDDEN * 3 / 4


@pytest.mark.soak
@pytest.mark.parametrize("what", ["weights", "tokens"])
def test_dropout_masks_do_not_depend_on_the_number_of_devices(what: str) -> None:
    model = drawn(Gpt(p=0.3))
    whole = Interpreter(capture(model, cross_entropy, batch()), state(model), random=(5, 2, 1))
    captured = divided(model, 2, what)

    devices = assert_exact(captured, model, 2, whole.step(batch()), random=(5, 2, 1))

    assert devices.devices[0].values[captured.model.loss] > 0
    wanted = Cut(0, blocks=3) if what == "weights" else Replicated()
    assert placements(captured)["qkv.weight"] == wanted


def test_operators_without_a_rule_work_on_whole_tensors() -> None:
    model = drawn(Unruly())
    captured = divided(model, 2, loss=nll)

    assert_exact(captured, model, 2, eager(model, nll, batch()), policy=())

    assert placements(captured)["up.weight"] == Cut(0)
    unknown = "an operator that Piper does not know how to divide by tp=2"
    for name, said in zip(("renorm", "kthvalue"), captured.undivided, strict=True):
        assert re.fullmatch(rf"{name} \(models\.py:\d+\), {unknown}", said)


@pytest.mark.soak
def test_one_of_two_stages_is_divided() -> None:
    model = drawn(llama(stages=2))
    captured = divided(model, 2, only=("PP1",))

    assert_exact(captured, model, 2, eager(model, cross_entropy, batch()))

    assert {r.tags: r.ways for r in captured.model.regions} == {(("PP", 0),): 1, (("PP", 1),): 2}
    assert placements(captured)["embedding.weight"] == Invariant()
    assert placements(captured)["head.weight"] == Cut(0)


@pytest.mark.soak
def test_a_user_decides_how_a_parameter_is_cut() -> None:
    model = drawn(llama(layers=1))
    seeds = {"embedding.weight": Cut(0), "*.out.weight": Cut(0)}
    captured = divided(model, 2, seeds=seeds)

    assert_exact(captured, model, 2, eager(model, cross_entropy, batch()))

    assert placements(captured)["blocks.0.attention.out.weight"] == Cut(0)
    assert placements(captured)["embedding.weight"] == Cut(0)


@pytest.mark.parametrize(
    ("seeds", "text"),
    [
        ({"embeding.weight": Cut(0)}, "no divided parameter is called embeding.weight"),
        (
            {"head.weight": Cut(2)},
            "head.weight has the shape [64, 16] and cannot be cut along dimension 2: a dimension "
            "less for 2 devices",
        ),
        ({"norm.weight": Cut(0)}, "norm.weight cannot be cut along dimension 0: nothing that"),
    ],
)
def test_a_seed_that_nothing_can_use_is_not_supported(seeds: dict, text: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(text)):
        divided(drawn(llama(layers=1)), 2, seeds=seeds)


def test_a_seed_that_does_not_divide_is_not_supported() -> None:
    text = (
        "plan: head.weight has the shape [63, 16] and cannot be cut along dimension 0: 63 rows or "
        "columns for 2 devices\n  fix: cut it along another dimension in `plan`, leave it to "
        "Piper, or use other devices"
    )

    with pytest.raises(CaptureError, match=re.escape(text)):
        divided(drawn(llama(layers=1, vocab=63)), 2, seeds={"head.weight": Cut(0)})


class Chosen(nn.Module):
    """Computes only what is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.head(self.words(tokens))
        return x[x > 0]


def test_a_size_that_depends_on_data_in_a_divided_region_is_not_supported() -> None:
    request = DivisionRequest(regions=("all",), ways=2, what="weights")

    with pytest.raises(CaptureError) as refused:
        capture(Chosen(), lambda x, _: x.sum(), batch(), divide=[request])

    (problem,) = refused.value.problems
    assert problem.what == "a size depends on data inside a divided region"
    assert problem.fix.endswith("leave that region out of the Shard of weights or tokens")


SELECTED = {
    "cross entropy": lambda x, y: F.cross_entropy(x, y),
    "its sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "smooth": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "log-probabilities": lambda x, y: F.nll_loss(x.log_softmax(-1), y),
    "normalized": lambda x, y: F.cross_entropy(F.layer_norm(x, x.shape[-1:]), y),
}


class Selected(Chosen):
    """Projects only tokens that have a label, as heads of masked language models do."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, kept = self.words(tokens), tokens > 3
        return self.head(x[kept]), tokens[kept]


@one_of(2)
@pytest.mark.parametrize(("name", "what"), levels_of(SELECTED, ["weights", "tokens"]))
def test_a_loss_of_selected_tokens_in_a_divided_region_says_what_to_write(
    name: str, what: What
) -> None:
    loss: Callable[..., Tensor] = SELECTED[name]
    request = DivisionRequest(regions=("all",), ways=2, what=what)

    with pytest.raises(CaptureError, match=r"size depends on data.*\n.*ignore_index") as refused:
        capture(Selected(), lambda found, _: loss(*found), batch(), divide=[request])

    assert "test_models.py" in str(refused.value)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCABULARY, 16), nn.BatchNorm1d(TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.words(tokens))


def test_a_buffer_that_changes_in_a_divided_region_is_not_supported() -> None:
    request = DivisionRequest(regions=("all",), ways=2, what="weights")

    with pytest.raises(CaptureError, match="changes the buffer norm.* inside a divided region"):
        capture(Normalized(), cross_entropy, batch(), divide=[request])


def test_what_is_cut_and_what_is_sent_is_shown(golden) -> None:
    _, captured = tensor_parallel()

    golden("division.txt", re.sub(r":\d+\)", ")", division(captured.model)))
