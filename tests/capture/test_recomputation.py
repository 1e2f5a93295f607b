"""What a region keeps, reads and repeats when its backward recomputes the forward."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from itertools import compress, product

import pytest
import torch
from capture.interpreter import assert_parity
from draws import every, one_of
from torch import Tensor, nn
from torch.nn import functional

from piper.capture import Captured, annotate, capture
from piper.capture.fx_nodes import closure
from piper.capture.graphs.flops import bytes_of
from piper.capture.graphs.partition import partition
from piper.capture.graphs.remat_policies import nodes_to_keep, price, producers
from piper.capture.kernels.unrepeatable import MAY_DIFFER
from piper.ir.model import Region
from piper.ir.remat_policy import RematPolicy
from piper.names import BI, BW, B, Phase

aten = torch.ops.aten
POLICIES: tuple[RematPolicy, ...] = (
    (),
    ("matmuls",),
    ("attention",),
    ("matmuls", "attention"),
    0.3,
    0.7,
    1.0,
    ("costly",),
)
Body = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """Two regions, of which the second is given."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.a, self.b = (nn.Linear(8, 8) for _ in range(3))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.first(x).tanh()
        with annotate("PP"):
            return self.body(self, x).mean()


def captured(body: Body) -> tuple[Captured, Region]:
    """After comparing it with autograd, whole and split, with and without recomputation."""
    model, x = Model(body), torch.randn(4, 8)
    found = capture(model, None, (x,))
    assert_parity(found, model, None, (x,), policies=((), 0.5))
    return found, found.model_with([()]).by_id["PP1"].recomputed[()]


def operators(found: Captured, region: Region, phase: Phase) -> Counter:
    graph = found.kernels.graphs[region.code][phase].graph
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    return Counter(getattr(target, "overloadpacket", target) for target in calls)


def layers(self: nn.Module, x: Tensor) -> Tensor:
    return torch.sin(self.b(torch.tanh(self.a(x))))


def test_the_forward_keeps_its_inputs_and_nothing_else() -> None:
    found, region = captured(layers)

    assert found.model.by_id["PP1"].saved
    assert region.saved == ()
    assert region.backward_inputs == (0,)
    assert region.recomputes and not found.model.by_id["PP1"].recomputes


def gated(self: nn.Module, x: Tensor) -> Tensor:
    """Only the weight gradient reads the product, and BI reads both its factors."""
    return self.b(torch.tanh(self.a(x)) * torch.sin(self.a(x)))


@pytest.mark.parametrize("body", [layers, gated])
def test_halves_repeat_the_forward_once_together(body: Body) -> None:
    found, region = captured(body)
    whole, first, second = (operators(found, region, phase) for phase in (B, BI, BW))

    assert whole[aten.tanh] == first[aten.tanh] == 1
    assert second[aten.tanh] == second[aten.sin] == second[aten.mul] == 0
    assert region.flops[BI] + region.flops[BW] == region.flops[B]
    assert region.carry == found.model.by_id["PP1"].carry


def test_without_input_gradients_the_second_half_repeats_the_forward() -> None:
    """BI has nothing to do: what it recomputed would only wait for BW."""
    found, _ = captured(layers)
    region = found.model_with([()]).by_id["PP0"].recomputed[()]

    assert found.model.by_id["PP0"].carry
    assert region.carry == ()
    assert operators(found, region, BI)[aten.tanh] == 0
    assert operators(found, region, BW)[aten.tanh] == 1


def test_a_region_without_backward_is_not_described_twice() -> None:
    model = Model(layers)
    model.first.requires_grad_(False)

    found = capture(model, None, (torch.randn(4, 8),))

    assert not found.model.by_id["PP0"].has_backward
    assert not found.model_with([()]).by_id["PP0"].recomputed


def normed(self: nn.Module, x: Tensor) -> Tensor:
    return self.b(functional.layer_norm(self.a(x), (8,)))


def widened(self: nn.Module, x: Tensor) -> Tensor:
    """A norm by hand in a wider type, as Hugging Face's models have it."""
    wide = self.a(x).to(torch.float64)
    return self.b((wide * wide.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype))


@pytest.mark.parametrize(
    ("body", "kept", "lean"),
    [
        # rows of 8 numbers of 4 bytes: a's result, the norm's, its mean and scale
        (normed, 4 * (8 + 8 + 1 + 1) * 4, 4 * (8 + 1 + 1) * 4),
        # a's result as 8 bytes or as it is, the scale, and what b reads: two operators make that
        (widened, 4 * (8 * 8 + 8 + 8 * 4), 4 * (8 * 4 + 8 + 8 * 4)),
    ],
)
def test_norms_are_repeated_from_what_they_read_in_its_own_type(
    body: Body, kept: int, lean: int
) -> None:
    found, _ = captured(body)
    whole = found.model_with([("costly",)]).by_id["PP1"]
    region = whole.recomputed[("costly",)]

    assert sum(spec.nbytes for spec in whole.saved) == kept
    assert sum(spec.nbytes for spec in region.saved) == lean


def top(self: nn.Module, x: Tensor) -> Tensor:
    score, chosen = torch.tanh(self.a(x)).topk(3)
    return torch.sin(self.b(x)).gather(1, chosen) * score


def ordered(self: nn.Module, x: Tensor) -> Tensor:
    return self.b(torch.sin(torch.tanh(self.a(x)).sort(dim=1).values))


def added(self: nn.Module, x: Tensor) -> Tensor:
    rows = torch.tensor([0, 1, 1, 0])
    return self.b(torch.sin(torch.zeros_like(x).index_add(0, rows, torch.tanh(self.a(x)))))


def summed(self: nn.Module, x: Tensor) -> Tensor:
    return self.b(torch.sin(torch.tanh(self.a(x)).cumsum(0)))


def branched(self: nn.Module, x: Tensor) -> Tensor:
    y = torch.tanh(self.a(x))
    return torch.sin(torch.cond(y.sum() > 0, lambda y: y.sort(1).values * 2, torch.neg, (y,)))


@pytest.mark.parametrize("body", every(2, [top, ordered, added, summed, branched]))
def test_what_may_differ_when_it_is_repeated_is_kept(body: Body) -> None:
    found, region = captured(body)

    assert region.saved
    assert operators(found, region, B)[aten.tanh] == 1, "what comes before it is recomputed"
    for phase in (B, BI, BW):
        own = operators(found, found.model.by_id["PP1"], phase)  # of the gradients: these run once
        again = operators(found, region, phase) - own
        assert {*MAY_DIFFER, torch.ops.higher_order.cond}.isdisjoint(again)


# What a policy keeps


class Attention(nn.Module):
    """One region with matrix products, attention, and element-wise operators between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            heads = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2)
            return (x + self.down(functional.gelu(self.up(torch.sin(x))))).square().mean()


@cache
def attention() -> tuple[Captured, Region]:
    model, x = Attention(), torch.randn(2, 6, 8)
    found = capture(model, None, (x,))
    assert_parity(found, model, None, (x,), policies=POLICIES)
    return found, found.model_with(POLICIES).regions[0]


def repeated(policy: RematPolicy) -> Counter:
    """Operators that the backward has more than without `Remat`."""
    found, kept = attention()
    return operators(found, kept.recomputed[policy], B) - operators(found, kept, B)


def nbytes(region: Region) -> int:
    return sum(spec.nbytes for spec in region.saved)


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu


def test_kept_results_are_not_computed_again() -> None:
    assert repeated(())[aten.addmm] == 3
    assert repeated(())[ATTENTION] == 1
    assert repeated(("matmuls",))[aten.addmm] == 0
    assert repeated(("matmuls",))[ATTENTION] == repeated(("matmuls",))[aten.gelu] == 1
    assert repeated(("attention",))[ATTENTION] == 0
    assert repeated(("attention",))[aten.addmm] == 3
    assert not {ATTENTION, aten.addmm} & {*repeated(("matmuls", "attention"))}


@one_of(2)
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75, 1.0])
def test_a_share_is_not_exceeded_and_is_nearly_the_best_choice(share: float) -> None:
    """The price of what is repeated, against that of every set of activations that fits.

    Nodes that two recomputations have in common count twice, so it is the best up to a few percent.
    """
    found, kept = attention()
    lowered = found.described.sources[0].lowered
    groups = list(producers(lowered.cut.saved).values())
    limit = share * nbytes(kept)

    def outcome(names: Iterable[str]) -> tuple[float, float]:
        cut = partition(lowered.joint, len(lowered.chunk.weights), (), frozenset(names))
        known = {*cut.saved, *lowered.joint.arguments, *lowered.joint.tangents}
        needed = closure([g for g in lowered.joint.gradients if g is not None], known)
        return sum(map(bytes_of, cut.saved)), price(needed & cut.recomputed)

    subsets = (compress(groups, chosen) for chosen in product((0, 1), repeat=len(groups)))
    every = [outcome(node.name for group in some for node in group) for some in subsets]
    size, found_price = outcome(nodes_to_keep(lowered.joint, lowered.cut, share))

    assert size == nbytes(found.model_with([share]).regions[0].recomputed[share]) <= limit
    assert found_price <= 1.05 * min(price for size, price in every if size <= limit)


def test_all_of_it_repeats_nothing() -> None:
    assert not repeated(1.0)


def test_it_says_what_it_frees_and_what_it_repeats() -> None:
    found, _ = attention()
    policies = [(), ("matmuls",), ("attention", "matmuls")]
    kept = found.model_with(policies).regions[0]
    nothing, products, both = (kept.recomputed[policy] for policy in policies)

    assert nothing.recomputes and products.recomputes and both.recomputes
    assert nothing.recomputes.frees == nbytes(kept) - nbytes(nothing)
    assert 0 == both.recomputes.flops < products.recomputes.flops < nothing.recomputes.flops
    assert nothing.recomputes.flops == nothing.flops[B] - kept.flops[B]


def test_policies_that_keep_the_same_share_their_graphs() -> None:
    found, _ = attention()
    region = found.model_with([(), ("topk",), 0.001]).regions[0]

    assert len({other.code for other in region.recomputed.values()}) == 1
