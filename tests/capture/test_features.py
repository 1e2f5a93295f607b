"""What models do besides multiplying matrices: each thing alone, bit by bit as in PyTorch."""

import copy
from collections.abc import Callable

import pytest
import torch
from capture.interpreter import Interpreter, assert_parity, eager, kernel, state
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from piper.capture import Captured, annotate, capture
from piper.names import B, F


class Model(nn.Module):
    """Three linear layers and a forward pass given by the test."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.given = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Tensor) -> Tensor:
        return self.given(self, *args)


def rows(count: int = 4) -> Tensor:
    return torch.randn(count, 8)


def captured_like_eager(model: nn.Module, *batch: object, **options: object) -> Captured:
    """Capture a model that returns its loss, compare it with PyTorch, and hand it on."""
    captured = capture(model, None, batch)
    assert_parity(captured, model, None, batch, **options)
    return captured


def ids(captured: Captured) -> list[str]:
    return [region.id for region in captured.model.regions]


def test_a_model_without_tags_is_one_region() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return self.c(self.a(x).relu()).square().mean()

    captured = captured_like_eager(Model(forward), rows())

    assert ids(captured) == ["all"]
    assert captured.unused == ("b.weight", "b.bias")


def test_independent_branches_stay_independent() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            left = self.a(x).tanh()
        with annotate("PP"):
            right = self.b(x).sigmoid()
        with annotate("PP"):
            return self.c(left * right).mean()

    captured = captured_like_eager(Model(forward), rows())

    left, right, join = captured.model.regions
    assert left.inputs == right.inputs == ("batch:0",)
    assert join.inputs == ("PP0/0", "PP1/0")


def test_regions_nest() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        for _ in range(2):
            with annotate("PP"):
                x = self.a(x).tanh()
                with annotate("EP"):
                    x = self.b(x).tanh()
                x = self.c(x)
        return x.mean()

    captured = captured_like_eager(Model(forward), rows())

    assert ids(captured) == ["PP0", "PP0.EP0", "PP0#1", "PP1", "PP1.EP1", "PP1#1"]
    assert captured.model.by_id["PP1.EP1"].tags == (("PP", 1), ("EP", 1))


def test_equal_regions_share_their_code() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            with annotate("PP"):
                x = functional.dropout(layer(x).tanh(), 0.5)
        with annotate("PP"):
            return x.mean()

    captured = capture(Model(forward), None, (rows(),))

    codes = [region.code for region in captured.model.regions]
    assert codes[1] == codes[2]
    assert len(set(codes)) == 3


def test_an_explicit_index_makes_one_region_of_several_blocks() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        for index, layer in zip((0, 0, 1), (self.a, self.b, self.c), strict=True):
            with annotate("PP", index):
                x = layer(x).tanh()
        return x.mean()

    captured = captured_like_eager(Model(forward), rows())

    assert ids(captured) == ["PP0", "PP1"]


def test_islands_in_a_model_leave_the_rest_to_regions_of_its_own() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.a(x).tanh()
            with annotate("EP"):
                x = self.b(x)
            x = self.c(x.tanh())
        return x.mean()

    captured = captured_like_eager(Model(forward), rows())

    assert ids(captured) == ["rest", "EP0", "rest#1", "EP1", "rest#2"]


def test_a_module_called_twice_gets_both_gradients() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x).tanh()
        with annotate("PP"):
            return self.b(self.a(x)).mean()

    captured = captured_like_eager(Model(forward), rows())

    assert list(captured.model.buckets) == ["PP0+PP1", "PP1"]


def test_frozen_and_untrained_parameters_are_kept_apart() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x).tanh()
        with annotate("PP"):
            return (self.b(x) * self.c(x).detach()).mean()

    model = Model(forward)
    model.a.requires_grad_(False)
    captured = captured_like_eager(model, rows())

    assert list(captured.model.buckets) == ["PP0:frozen", "PP1", "PP1:frozen"]
    assert [b.trainable for b in captured.model.buckets.values()] == [False, True, False]
    assert not captured.model.by_id["PP0"].has_backward
    assert captured.model.by_id["PP1"].input_grads == ()


def test_an_output_whose_gradient_nobody_needs_is_detached() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x).tanh()
            y = self.b(x)
        with annotate("PP"):
            return (self.c(x) * y.detach()).mean()

    captured = captured_like_eager(Model(forward), rows())

    first = captured.model.by_id["PP0"]
    assert len(first.outputs) == 2
    assert first.output_grads == (0,)


def test_a_tied_parameter_used_once_without_gradient() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.b(x) + functional.linear(x, self.a.weight.detach())
        with annotate("PP"):
            return functional.linear(x.tanh(), self.a.weight).mean()

    captured_like_eager(Model(forward), rows())


def test_views_are_repeated_where_they_are_used() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            left, right = x.t().chunk(2)
        with annotate("PP"):
            return (left * right).sum() + self.b(x).mean()

    captured = captured_like_eager(Model(forward), rows())

    assert captured.model.by_id["PP0"].outputs == ("PP0/0",)


def test_boundaries_are_contiguous() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x).t() * 2
        with annotate("PP"):
            return self.b(x.t()).square().mean()

    # PyTorch multiplies transposed matrices here, which rounds otherwise.
    captured_like_eager(Model(forward), rows(), exact=False)


def test_what_depends_on_no_parameter_is_repeated_instead_of_sent() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        mask = torch.ones(8, 8).tril() * torch.arange(8).cos()
        with annotate("PP"):
            x = self.a(x) @ mask
        with annotate("PP"):
            return (self.b(x) @ mask).mean()

    captured = captured_like_eager(Model(forward), rows())

    assert captured.model.by_id["PP1"].inputs == ("PP0/0",)


def test_a_marked_region_without_parameters_stays() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = x * 2
        with annotate("PP"):
            return self.b(x).mean()

    captured = captured_like_eager(Model(forward), rows())

    assert ids(captured) == ["PP0", "PP1"]
    assert not captured.model.by_id["PP0"].has_backward


def test_gradients_own_their_memory() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q, self.r = (nn.Parameter(torch.randn(4, 8)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            with annotate("PP"):
                y = self.r * x
            with annotate("PP"):
                z = y + self.p + self.q + self.q.view(8, 4).view(4, 8)
            with annotate("PP"):
                return (z.reshape(-1) + y.reshape(-1)).sum()

    # The interpreter looks for shared memory: every gradient here is the one that came in.
    captured_like_eager(Sums(), rows())


def test_in_place_operations() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            x.mul_(2).add_(1)
            x[:, :2] = 0.5
            x[:, 4:] = x[:, :4] * 3
        with annotate("PP"):
            y = torch.zeros(4, 8)
            y[:2] = self.b(x)[:2]
            return y.square_().mean()

    captured_like_eager(Model(forward), rows())


def test_no_grad_inside() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            with torch.no_grad():
                scale = self.b(x).abs().mean()
        with torch.no_grad(), annotate("PP"):
            y = self.c(x)
        with annotate("PP"):
            return (self.c(x) * y / scale).mean()

    captured_like_eager(Model(forward), rows())


def test_autocast_inside() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            with torch.autocast("cpu", torch.bfloat16):
                y = self.b(x)
        with annotate("PP"), torch.autocast("cpu", torch.bfloat16):
            z = self.c(y)
        return (x + z).mean()

    captured = captured_like_eager(Model(forward), rows())

    assert captured.model.values["PP0/1"].specs[0].dtype == "bfloat16"
    assert all(
        spec.shape != (8, 8) for region in captured.model.regions for spec in region.saved
    ), "weights in another type are made again"


def test_batch_norm_updates_its_buffers() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.norm(self.a(x))
        with annotate("PP"):
            return self.b(x.tanh()).mean()

    captured = captured_like_eager(Model(forward, norm=nn.BatchNorm1d(8)), rows())

    assert captured.model.by_id["PP0"].stateful
    assert not captured.model.by_id["PP1"].stateful
    assert "PP0:buffers" in captured.model.buckets


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm2d(8, affine=False)], ids=str)
def test_batch_norm_without_a_momentum_averages_all_batches(norm: nn.Module) -> None:
    norm.momentum = None
    kept = copy.deepcopy(norm).double()
    x = torch.randn(4, 8, *[3, 2][: 2 * isinstance(norm, nn.BatchNorm2d)]).double()

    def forward(self: Model, x: Tensor) -> Tensor:
        return (self.norm(x * self.a.weight.mean()) ** 3).mean()

    model = Model(forward, norm=kept).double()
    captured, weights = capture(model, None, (x,)), state(model)
    for step in range(3):
        expected = eager(model, None, (x + step,))
        found = Interpreter(captured, weights).step((x + step,))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(weights[name], buffer, rtol=1e-12, atol=1e-12)

    assert weights["norm.num_batches_tracked"] == 3


def test_the_backward_reads_the_old_value_of_an_updated_buffer() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("seen", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            old = self.seen.clone()
            self.seen += 1
            return (self.layer(x) * old * self.seen).mean()

    captured_like_eager(Counting(), rows())


def test_a_buffer_updated_through_a_view() -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("seen", torch.ones(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            with annotate("PP"):
                x = self.layer(x)
                self.seen[:2] = x.detach()[:2]
            with annotate("PP"):
                return self.layer(x).mean()

    captured = captured_like_eager(Filling(), rows())

    assert [region.stateful for region in captured.model.regions] == [True, False]


def test_a_buffer_that_is_assigned_and_used_in_the_next_region() -> None:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("copy", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            with annotate("PP"):
                x = self.layer(x)
                self.mean = self.copy = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            with annotate("PP"):
                return (self.layer(x) - self.mean).square().mean()

    captured = captured_like_eager(Smooth(), rows())

    assert len(captured.model.by_id["PP0"].outputs) == 2


def test_buffers_that_stay_the_same() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("scale", torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            with annotate("PP"):
                x = self.layer(x) * self.scale
            with annotate("PP"):
                return (x * self.scale).sum()

    captured = captured_like_eager(Scaled(), rows())

    assert list(captured.model.buckets) == ["PP0", "PP0+PP1:buffers"]


def test_models_with_several_outputs() -> None:
    def forward(self: Model, x: Tensor) -> dict:
        with annotate("PP"):
            x = self.a(x)
        with annotate("PP"):
            return {"logits": self.b(x), "hidden": (x, None)}

    def loss(output: dict, target: Tensor) -> Tensor:
        return (output["logits"] - target).abs().mean() + output["hidden"][0].square().mean()

    model, batch = Model(forward), (rows(), rows())

    assert_parity(capture(model, loss, batch), model, loss, batch)


def test_arguments_that_are_no_tensors() -> None:
    def forward(self: Model, parts: dict, power: int, scale: float) -> Tensor:
        x = self.a(parts["x"][0]) + self.b(parts["x"][1])
        return (x**power).mean() * scale

    batch = ({"x": [rows(), rows()]}, 2, 0.5)
    captured = captured_like_eager(Model(forward), *batch)

    assert captured.inputs.constants == {2: 2, 3: 0.5}


def test_checkpoints_keep_only_what_enters_them() -> None:
    def block(self: Model, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).tanh()

    def forward(self: Model, x: Tensor, recompute: bool) -> Tensor:
        for _ in range(3):
            x = checkpoint(block, self, x, use_reentrant=False) if recompute else block(self, x)
        return x.square().sum()

    model, x = Model(forward), rows()
    plain, saving = (captured_like_eager(model, x, recompute) for recompute in (False, True))

    assert len(plain.model.by_id["all"].saved) == 6
    assert len(saving.model.by_id["all"].saved) == 3


def test_reentrant_checkpoints() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        x = self.a(x)
        return checkpoint(lambda y: self.b(y.tanh()).tanh(), x, use_reentrant=True).sum()

    captured_like_eager(Model(forward), rows())


def test_sizes_that_depend_on_data_inside_a_region() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
        with annotate("PP"):
            chosen = self.b(x)[x[:, 0] > 0]
            return (chosen.square().sum() + x.sum()) / 4

    model = Model(forward)
    captured = capture(model, None, (rows(),))

    for seed in range(4):
        torch.manual_seed(seed)
        assert_parity(captured, model, None, (rows(),))


def test_sizes_that_depend_on_data_across_regions() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.a(x)
            where = (x[:, 0] > 0).nonzero().squeeze(1)
            chosen = x[where].tanh()
        with annotate("PP"):
            chosen = self.b(chosen).tanh()
        with annotate("PP"):
            return self.c(x.index_add(0, where, chosen)).mean()

    model = Model(forward)
    captured = capture(model, None, (rows(),))

    assert captured.model.values[captured.model.by_id["PP1"].inputs[0]].specs[0].shape == (None, 8)
    for seed in range(4):
        torch.manual_seed(seed)
        assert_parity(captured, model, None, (rows(),))


def test_numbers_from_tensors_as_sizes() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            y = self.a(x)
            number = (y[:, 0] > 0).sum().item()
            z = y[:number].tanh()
        with annotate("PP"):
            z = torch.cat((z, torch.ones(number, 8)), dim=1).view(2 * number, 8)
            return (z[:number] * y[:number]).sum() + self.b(y).mean()

    model = Model(forward)
    captured = capture(model, None, (rows(),))

    for seed in range(4):
        torch.manual_seed(seed)
        assert_parity(captured, model, None, (rows(),))


def test_a_number_that_the_backward_needs() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return (self.a(x) * self.b(x).detach().abs().sum().item()).square().mean()

    captured = captured_like_eager(Model(forward), rows())

    assert "float64" in [spec.dtype for spec in captured.model.by_id["all"].saved]


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", "float32"), ("float64", "float64")])
def test_a_loss_is_float32_or_better(dtype: str, kept: str) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return self.a(x).square().mean()

    model = Model(forward).to(getattr(torch, dtype))
    captured = captured_like_eager(model, rows().to(getattr(torch, dtype)))

    assert captured.model.values["loss"].specs[0].dtype == kept


def test_nothing_of_the_trace_stays_on_the_model() -> None:
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.cache = nn.Linear(8, 8), {}

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.cache["x"] = self.layer(x)
            return self.last.mean()

    model = Caching()
    captured = capture(model, None, (rows(),))

    assert not model.cache
    assert not hasattr(model, "last")
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in model.state_dict().values())
    assert_parity(captured, model, None, (rows(),))


@pytest.mark.soak
def test_compiled_kernels_compute_the_same_up_to_rounding() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return functional.dropout(self.norm(self.a(x)), 0.5).square().mean()

    model, batch = Model(forward, norm=nn.BatchNorm1d(8)), (rows(),)
    captured = capture(model, None, batch)
    before = state(model), state(model)

    plain = Interpreter(captured, before[0]).step(batch)
    compiled = Interpreter(captured, before[1], compiled=True).step(batch)

    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(before[1], before[0])


def test_kernels_are_made_once() -> None:
    model = Model(lambda self, x: self.a(x).mean())
    captured = capture(model, None, (rows(),))

    assert kernel(captured, "all", F) is kernel(captured, "all", F)
    assert kernel(captured, "all", F) is not kernel(captured, "all", B)
    assert eager(model, None, (rows(),))


def test_what_is_overwritten_whole_gets_a_gradient_of_zero() -> None:
    """Not none: an optimizer with weight decay changes a parameter whose gradient is zero."""

    def forward(self: Model, x: Tensor) -> Tensor:
        h = self.b(x).clone()
        h.copy_(self.c(x))
        return self.a(h).square().mean()

    model = Model(forward)

    captured = captured_like_eager(model, rows())

    assert not captured.unused
    assert model.b.weight.grad.count_nonzero() == 0


def test_a_part_that_is_overwritten_lets_the_rest_through() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        h = self.b(x).clone()
        h[:, :3] = self.c(x)[:, :3]
        empty = torch.empty_like(h)
        empty[...] = h
        return self.a(empty).square().mean()

    captured_like_eager(Model(forward), rows())
