"""A graph that was text on the way computes the same bits, and calls nothing but what it may."""

import json
import re
from collections.abc import Callable
from functools import cache

import experts
import pytest
import torch
from capture.interpreter import kernel
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from piper.capture import Captured, annotate, capture
from piper.capture.fx_nodes import value
from piper.capture.kernels import callables
from piper.capture.kernels.callables import Kernel, Kernels
from piper.capture.kernels.shipping import from_json, to_json
from piper.errors import CaptureError
from piper.names import BI, B, F, Phase, RegionId

FIX = (
    "\n  fix: make it an operator with torch.library.custom_op, in a module that every process "
    "imports"
)


def shipped(captured: Captured, region: str, phase: Phase, ways: int = 1) -> Kernel:
    """As another process has it."""
    code, there = captured.code(captured.model.by_id[RegionId(region)], ways), Kernels()
    there.add(code.graph, phase, False, captured.kernels.to_json(code.graph, phase, False))
    return there.get(code, phase, False)


def assert_same(found: object, wanted: object) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@cache
def mixed() -> Captured:
    torch.manual_seed(0)
    example = torch.randn(2, 3, experts.WIDTH)
    return capture(experts.Mixed(1, "spread"), experts.loss, (example, example))


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_share_of_experts_takes_any_number_of_rows(rows: int) -> None:
    captured = mixed()
    (region,) = [r for r in captured.model.regions if "EP" in r.id]
    kernels = {p: kernel(captured, region.id, p, ways=2) for p in (F, B, BI)}
    there = {p: shipped(captured, region.id, p, ways=2) for p in (F, B, BI)}
    buckets = [
        tuple(torch.randn(2, *p.spec.shape[1:]) for p in captured.model.buckets[name].parameters)
        for name in region.buckets
    ]
    types = [captured.model.values[name].specs[0].dtype for name in region.inputs]
    counts, x = torch.tensor([rows, 0]), torch.randn(rows, experts.WIDTH)
    given = [counts if dtype == "int64" else x for dtype in types]

    wanted, found = kernels[F](*buckets, *given), there[F](*buckets, *given)

    assert_same(found, wanted)
    assert wanted[0].shape == (rows, experts.WIDTH)
    read = [buckets[k] for k in region.backward_buckets]
    read += [given[k] for k in region.backward_inputs]
    for phase in (B, BI):
        ends = [kernel[phase](*read, wanted[-1], wanted[0]) for kernel in (there, kernels)]
        assert_same(*ends)


def test_for_inductor_a_size_that_is_not_known_yet_stays_one() -> None:
    captured = mixed()
    (region,) = [r for r in captured.model.regions if "EP" in r.id]
    module = captured.experts.get(region.code, 2)[B]

    found = from_json(to_json(module, described=True))

    assert shapes(found) == shapes(module)
    assert (
        sum("u0" in text for text in shapes(found)) == 4
    )  # rows, two things kept of them, gradients


def shapes(module: fx.GraphModule) -> list[str]:
    """Of all arguments; unknown sizes by the order in which they come."""
    vals = [value(node) for node in module.graph.find_nodes(op="placeholder")]
    text = "\n".join(f"{tuple(t.shape)} {t.stride()} {t.dtype}" for t in tree_leaves(vals))
    names = {name: f"u{k}" for k, name in enumerate(dict.fromkeys(re.findall(r"u\d+", text)))}
    return re.sub(r"u\d+", lambda found: names[found[0]], text).splitlines()


class Dropping(nn.Module):
    """Two equal regions, which must not drop the same elements, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with annotate("PP"):
                x = nn.functional.dropout(layer(x), 0.5)
        return x


def test_dropouts_keep_their_numbers() -> None:
    captured = capture(Dropping(), nn.functional.mse_loss, (torch.ones(4, 6), torch.ones(4, 6)))
    _, first, second, _ = captured.model.regions
    given = {"random": torch.tensor([3, 1, 4])}
    inputs = [given.get(name, torch.ones(4, 6)) for name in first.inputs]
    reads = [(torch.randn(6, 6), torch.randn(6)), *inputs]

    found = [shipped(captured, region.id, F)(*reads) for region in (first, second)]

    assert first.code == second.code
    assert_same(found, [kernel(captured, region.id, F)(*reads) for region in (first, second)])
    assert not torch.equal(found[0][0], found[1][0])


class Choosing(nn.Module):
    """Which branch runs depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.layer, lambda y: y * 2, (x,)).sum()


def test_graphs_inside_graphs_go_along() -> None:
    captured = capture(Choosing(), None, (torch.ones(4, 6),))
    weights = torch.randn(6, 6), torch.randn(6)

    found = shipped(captured, "all", F)

    for x in (torch.ones(4, 6), -torch.ones(4, 6)):
        assert_same(found(weights, x), kernel(captured, RegionId("all"), F)(weights, x))


def constants(x: Tensor) -> tuple[Tensor, ...]:
    table = torch.tensor([[1.5, -float("inf")], [0.1, 2.0]], dtype=torch.float64)
    one = torch.tensor(3, dtype=torch.int32)
    return (x * table + one, torch.zeros(2, dtype=torch.bfloat16, device=x.device))


def numbers(x: Tensor) -> tuple[Tensor, ...]:
    return (
        x.masked_fill(x > 0.5, -float("inf")),
        x.contiguous(memory_format=torch.contiguous_format) * 1e-12,
        torch.view_as_complex(x) * (1 + 2j),
    )


@pytest.mark.parametrize("function", [constants, numbers], ids=lambda f: f.__name__)
def test_constants_and_options_stay_what_they_are(function: Callable) -> None:
    x = torch.randn(2, 2, dtype=torch.float64)
    module = make_fx(function)(x)

    found = from_json(to_json(module))

    assert_same(found(x), function(x))
    assert to_json(found) == to_json(module)


def test_another_gpu_is_the_own_one() -> None:
    graph = fx.Graph()
    graph.call_function(torch.ops.aten.zeros.default, ([2],), {"device": torch.device("cuda:3")})
    graph.output(())

    found = from_json(to_json(fx.GraphModule({}, graph)))

    assert next(iter(found.graph.nodes)).kwargs == {"device": torch.device("cuda")}


def calling(function: Callable | str) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    add = graph.call_method if isinstance(function, str) else graph.call_function
    graph.output((add(function, (x,)),))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("function", "name"),
    [(nn.functional.relu, "<function relu at"), ("backward", "backward"), (eval, "<built-in")],
    ids=["function", "method", "builtin"],
)
def test_what_has_no_name_is_not_sent(function: Callable | str, name: str) -> None:
    with pytest.raises(CaptureError) as refused:
        to_json(calling(function))

    assert f": {name}" in str(refused.value)
    assert str(refused.value).endswith(f"has no name by which another process can find it{FIX}")


@pytest.mark.parametrize(
    "name",
    ["os.system", "torch.load", "ops.aten.mm", "ops.nowhere.at.all", "ops.os.system.default"],
)
def test_what_is_not_known_is_not_called(name: str) -> None:
    row = json.loads(to_json(calling(torch.mm)))
    row["nodes"][1][2] = name

    with pytest.raises(CaptureError, match="has no name by which another process can find it"):
        from_json(json.dumps(row))


class Branching(nn.Module):
    """Two regions alike but for what is inside their branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, (yes, no) in zip(self.layers, [(1, 1), (5, 7), (2, 3), (1, 1)], strict=True):
            with annotate("PP"):
                x = layer(x)
                if yes != no:
                    x = torch.cond(x.sum() > 0, lambda y, k=yes: y * k, lambda y, k=no: y * k, (x,))
        return x


def test_regions_with_other_branches_are_other_code() -> None:
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(2, 3)
    captured = capture(model, nn.functional.mse_loss, (x, x))
    _, first, second, _ = captured.model.regions
    reads = ((torch.eye(3), torch.ones(3)), torch.ones(2, 3))

    results = [kernel(captured, region.id, F)(*reads)[0] for region in (first, second)]

    assert first.code != second.code
    assert_same(results[0], torch.full((2, 3), 10.0))
    assert_same(results[1], torch.full((2, 3), 4.0))


class Turned(nn.Module):
    """A constant that does not lie in memory in the order of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), torch.arange(12.0).view(3, 4).t()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.as_strided(self.table, (4,), (1,))


def test_a_constant_lies_in_memory_as_it_did() -> None:
    x = torch.randn(2, 4)
    captured = capture(Turned(), nn.functional.mse_loss, (x, x))
    (region,) = captured.model.regions
    reads = ((torch.eye(4), torch.zeros(4)), x, x)

    found = shipped(captured, region.id, F)(*reads)

    assert_same(found[0], kernel(captured, region.id, F)(*reads)[0])


def test_what_was_sent_is_compiled_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes compile at once then: who sends it does not wait for who gets it."""
    compiled = []
    monkeypatch.setattr(callables, "_compiled", lambda module: compiled.append(module) or tuple)
    captured, there = mixed(), Kernels()
    code = captured.code(captured.model.by_id[RegionId("PP0")])

    there.add(code.graph, F, True, captured.kernels.to_json(code.graph, F, True))
    assert not compiled

    assert there.get(code, F, True) is there.get(code, F, True)
    assert len(compiled) == 1
