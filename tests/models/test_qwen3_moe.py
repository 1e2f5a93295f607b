"""The reference mixture of experts: its regions, its side loss, its routing and its sizes."""

import resource
from dataclasses import replace

import pytest
import torch
from capture.interpreter import assert_parity
from draws import one_of
from torch import Tensor, nn

from piper.capture import Captured, capture
from piper.job.compile.compiler import compile_strategy
from piper.models.qwen3_moe import PRESETS, Mixture, Qwen3Moe, balance, moe_loss
from piper.strategies import dualpipev

TINY = PRESETS["tiny"]
SMALL = replace(TINY, layers=2)


def tokens(batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randint(64, (batch, 8)), torch.randint(64, (batch, 8))


@pytest.fixture(scope="module")
def two_stages() -> Captured:
    with torch.device("meta"):
        model = Qwen3Moe(TINY, stages=2)
    return capture(model, moe_loss, tokens())


@pytest.mark.soak
def test_experts_are_regions_of_their_own_in_their_stage(two_stages: Captured) -> None:
    assert [region.id for region in two_stages.model.regions] == [
        *("PP0", "PP0.EP0", "PP0#1", "PP0.EP1", "PP0#2"),
        *("PP1", "PP1.EP2", "PP1#1", "PP1.EP3", "PP1#2"),
    ]
    experts = [region for region in two_stages.model.regions if "EP" in region.id]
    assert experts[1].tags == (("PP", 0), ("EP", 1))
    assert experts[2].tags == (("PP", 1), ("EP", 2))
    assert len({region.code for region in experts}) == 1


def test_experts_read_rows_and_counts_and_their_weights(two_stages: Captured) -> None:
    for region in (region for region in two_stages.model.regions if "EP" in region.id):
        rows, counts = (two_stages.model.values[name].specs[0] for name in region.inputs)
        assert (rows.shape, rows.dtype) == ((2 * 8 * TINY.chosen, TINY.dim), "float32")
        assert (counts.shape, counts.dtype) == ((TINY.experts,), "int64")
        (bucket,) = (two_stages.model.buckets[name] for name in region.buckets)
        assert {spec.shape[0] for spec in bucket.specs} == {TINY.experts}


def test_stages_send_the_residual_and_one_side_loss(two_stages: Captured) -> None:
    sent = [two_stages.model.values[name].specs[0] for name in two_stages.model.by_id["PP1"].inputs]

    assert [spec.shape for spec in sent] == [(2, 8, TINY.dim), (2,)]


def test_regions_do_what_the_model_does(two_stages: Captured) -> None:
    torch.manual_seed(0)
    model = spread(Qwen3Moe(TINY, stages=2))

    assert_parity(two_stages, model, moe_loss, tokens(), exact=False)
    send_all_tokens_to_the_same_experts(model)
    assert_parity(two_stages, model, moe_loss, tokens(), exact=False)


@pytest.mark.soak
def test_a_model_like_deepseek_is_captured_and_one_expert_may_get_all_tokens() -> None:
    torch.manual_seed(0)
    options = {"shared": 1, "dense_layers": 1, "hidden": 24, "normalise": False, "chosen": 1}
    model = spread(Qwen3Moe(replace(SMALL, **options)))

    captured = capture(model, moe_loss, tokens())

    assert [region.id for region in captured.model.regions] == ["PP0", "PP0.EP0", "PP0#1"]
    assert_parity(captured, model, moe_loss, tokens(), exact=False)
    send_all_tokens_to_the_same_experts(model)
    assert_parity(captured, model, moe_loss, tokens(), exact=False)


def spread(model: nn.Module) -> nn.Module:
    """Larger weights: scores that differ, and gradients one can tell from zero."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def send_all_tokens_to_the_same_experts(model: nn.Module) -> None:
    """A router that cannot tell tokens apart: all others get no rows."""
    for mixture in (module for module in model.modules() if isinstance(module, Mixture)):
        nn.init.zeros_(mixture.router.weigh.weight)
        x = torch.randn(2, 8, mixture.config.dim)
        assert mixture.router(x)[1].unique().numel() == mixture.config.chosen


def test_a_mixture_is_a_weighted_sum_of_its_experts() -> None:
    torch.manual_seed(0)
    mixture = spread(Mixture(replace(SMALL, shared=2))).double()
    x = torch.randn(2, 5, SMALL.dim, dtype=torch.float64)

    mixed, _ = mixture(x, 0.0)

    score, expert, _ = mixture.router(x)
    for b, t in [(0, 0), (0, 4), (1, 3)]:
        chosen = zip(score[b, t], expert[b, t], strict=True)
        expected = sum(s * alone(mixture, x[b, t], int(e)) for s, e in chosen)
        torch.testing.assert_close(mixed[b, t], expected + mixture.shared(x[b, t]))


def alone(mixture: Mixture, x: Tensor, expert: int) -> Tensor:
    gate, up = (x @ mixture.experts.gate_up[expert]).chunk(2)
    return (nn.functional.silu(gate) * up) @ mixture.experts.down[expert]


@pytest.mark.parametrize("normalise", [False, True])
def test_scores_of_a_token_add_up_to_one_if_asked_for(normalise: bool) -> None:
    router = Mixture(replace(SMALL, normalise=normalise)).router

    score, _, probabilities = router(torch.randn(2, 5, SMALL.dim, dtype=torch.float32))

    assert torch.allclose(score.sum(-1), torch.ones(2, 5)) == normalise
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 5))


def test_the_side_loss_is_one_when_balanced_and_more_when_not() -> None:
    alike, one_sided = torch.full((1, 4, 2), 0.5), torch.tensor([0.75, 0.25]).expand(1, 4, 2)

    assert balance(torch.tensor([[2, 2]]), alike, chosen=1) == 1
    assert balance(torch.tensor([[4, 0]]), one_sided, chosen=1) == 1.5


def losses(model: Qwen3Moe, batch: tuple[Tensor, Tensor], of) -> list[Tensor]:
    """The loss and all its gradients."""
    loss = of(model(batch[0]), batch[1])
    return [loss, *torch.autograd.grad(loss, model.parameters(), allow_unused=True)]


def side_only(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return output[1].mean()


@pytest.mark.parametrize(("of", "tolerance"), [(side_only, 1e-12), (moe_loss, 1e-5)])
def test_the_loss_is_the_same_however_the_batch_is_split(of, tolerance: float) -> None:
    torch.manual_seed(0)
    model, batch = spread(Qwen3Moe(SMALL)).double(), tokens(batch=4)

    whole = losses(model, batch, of)

    parts = [losses(model, part, of) for part in zip(*(t.chunk(4) for t in batch), strict=True)]
    for expected, *found in zip(whole, *parts, strict=True):
        if expected is None:  # the head, for the side loss alone
            assert found == [None] * 4
        else:
            mean = torch.stack(found).mean(0)
            torch.testing.assert_close(mean, expected, rtol=tolerance, atol=tolerance)


def test_the_side_loss_trains_the_router_alone_of_a_mixture() -> None:
    mixture = spread(Mixture(SMALL))

    _, side = mixture(torch.randn(2, 5, SMALL.dim), 0.0)
    side.sum().backward()

    assert mixture.router.weigh.weight.grad.abs().sum() > 0
    assert mixture.experts.down.grad is None


def test_it_learns_a_sequence_by_heart() -> None:
    torch.manual_seed(0)
    model = Qwen3Moe(replace(SMALL, vocab=16, layers=1))
    sequence = torch.randperm(16)[:9].unsqueeze(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    found = []

    for _ in range(60):
        loss = moe_loss(model(sequence[:, :-1]), sequence[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())

    assert found[-1] < 0.1 < 2 < found[0]


SIZES = {"demo": 7e6, "1B": 1e9, "9B": 9e9, "DeepSeek-V3": 671e9}


@one_of(2)
@pytest.mark.parametrize("name", SIZES)
def test_presets_have_the_size_they_are_named_after(name: str) -> None:
    with torch.device("meta"):
        model = Qwen3Moe(PRESETS[name])

    size = sum(parameter.numel() for parameter in model.parameters())

    assert size == pytest.approx(SIZES[name], rel=0.05)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "pp", "dp"), [("1B", 2, 4), ("9B", 4, 4), ("DeepSeek-V3", 8, 8)])
def test_large_models_compile_without_memory_for_weights(name: str, pp: int, dp: int) -> None:
    """Experts over all replicas, DualPipeV; 1B, 9B and 671B parameters."""
    with torch.device("meta"):
        model = Qwen3Moe(PRESETS[name], stages=2 * pp)
    batch = torch.zeros(1, 128, dtype=torch.long), torch.zeros(1, 128, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    captured = capture(model, moe_loss, batch)
    sharded = {dict(r.tags)["PP"] for r in captured.model.regions if "EP" in r.id}
    strategy = dualpipev(
        pp=pp, microbatches=2 * pp, dp=dp, ep=dp if name != "1B" else 4, zero=2,
        expert_stages=sharded,
    )  # fmt: skip

    compiled = compile_strategy(captured.model, strategy.directives)

    assert len(compiled.plans) == pp * dp
    assert len({region.code for region in captured.model.regions}) < 12
    for region, cut in compiled.dag.shardings.items():
        captured.experts.prove(captured.model.by_id[region].code, cut.ways)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2_000_000  # kilobytes


@pytest.mark.parametrize("dense", [-1, 2])
def test_layers_that_cannot_be_dense_are_refused(dense: int) -> None:
    with pytest.raises(ValueError, match=f"dense_layers={dense} does not fit layers=2"):
        Qwen3Moe(replace(SMALL, dense_layers=dense))
