"""What cannot be captured is refused, with the line of the model and a way out."""

import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from piper.capture import annotate, capture, tag
from piper.errors import CaptureError, InputError


class Model(nn.Module):
    def __init__(self, forward: Callable[..., object]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.given = forward

    def forward(self, *args: object) -> object:
        return self.given(self, *args)


def refusal(forward: Callable[..., object], *batch: object) -> str:
    """The message, with the line counted from the beginning of `forward`."""
    with pytest.raises(CaptureError) as caught:
        capture(Model(forward), None, batch or (torch.randn(4, 8),))
    first = inspect.getsourcelines(forward)[1]
    return re.sub(
        r"^test_refusals.py:(\d+)", lambda m: f"line {int(m[1]) - first}", str(caught.value)
    )


VALUE = """\
line 2: Python code needs the value of a tensor, which differs from batch to batch
  fix: keep the decision in tensors (torch.where, masking, indexing), or pass the value as a \
Python number in `example`, where it becomes a constant"""


def test_a_decision_on_a_tensor() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            y = -y
        return y.mean()

    assert refusal(forward) == VALUE


def test_a_product_of_different_types() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return self.layer(x).mean()

    assert refusal(forward, torch.randn(4, 8).double()) == (
        "line 1: a product of float64 and float32: torch multiplies tensors of one type\n"
        "  fix: give batches in the type of the model, as in x.to(torch.float32), or write "
        "model.to(torch.float64)"
    )


def test_item_in_python() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.mean() * (2.0 if y.argmax().item() > 3 else 1.0)

    assert refusal(forward) == VALUE


def test_tolist_in_python() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        y = self.layer(x)
        return sum(y[:, i].mean() for i in range(y.argmax(1).tolist()[0]))

    assert refusal(forward) == VALUE


@pytest.mark.parametrize("how", [lambda y: y.numpy(), numpy.asarray, lambda y: y.tolist()])
def test_values_as_arrays_and_lists(how: Callable[[Tensor], Any]) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        found = torch.as_tensor(how(x.detach()))
        return self.layer(x).mean() + found.sum()

    text = refusal(forward)

    assert "Python code needs the value of a tensor" in text, text
    assert "fix: keep the decision in tensors" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        lambda x: torch.nested.as_nested_tensor(list(x)),
        lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4])),
    ],
)
def test_nested_tensors(make: Callable[[Tensor], Tensor]) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(self.layer(make(x)), 0.0).mean()

    assert "nested tensors are not supported" in refusal(forward)


def test_a_tensor_as_a_python_float() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.mean() * float(y.sum())

    assert refusal(forward) == VALUE


@torch.library.custom_op("test_refusals::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2 if grad.sum() > 0 else grad.clone() * 2)


def test_a_decision_in_the_backward_of_an_operator() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            return twice(self.layer(x)).mean()

    assert refusal(forward) == (
        "line 2: the region that begins here, or its derivative, needs a number that differs "
        "from batch to batch\n"
        "  fix: take sizes from tensors (x.shape[0]) instead of numbers (.item()), and decide "
        "with torch.where, also in the backward of your own operators"
    )


def test_random_numbers() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        noise = torch.poisson(x.abs())
        return (self.layer(x) * noise).mean()

    assert refusal(forward) == (
        "line 1: poisson draws random numbers, which would depend on the strategy\n"
        "  fix: draw them outside of the model and pass them as an argument, or use torch.rand, "
        "randn, randint, bernoulli, multinomial or dropout"
    )


def test_sparse_gradients() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(8, 8, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.words(x).mean()

    with pytest.raises(CaptureError) as caught:
        capture(Words(), None, (torch.zeros(4, dtype=torch.long),))

    assert str(caught.value) == (
        "model: the gradient of words.weight is sparse\n"
        "  fix: create the embedding with sparse=False"
    )


def test_buffers_that_change_behind_the_traces_back() -> None:
    norm = nn.InstanceNorm1d(4, track_running_stats=True)

    class Normed(Model):
        def __init__(self) -> None:
            super().__init__(lambda self, x: self.norm(self.layer(x).unsqueeze(0)).mean())
            self.norm = norm

    with pytest.raises(CaptureError) as caught:
        capture(Normed(), None, (torch.randn(4, 8),))

    where, message = str(caught.value).split(": ", 1)
    assert where.startswith("test_refusals.py:")
    assert message == (
        "an operation in the region that begins here changes a buffer, which a trace misses\n"
        "  fix: turn off its running statistics, or update the buffer in the module's own code"
    )


def test_a_model_that_returns_no_loss() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return self.layer(x)

    assert refusal(forward) == (
        "model: it returns a tensor [4, 8] of float32, not a scalar loss\n"
        "  fix: return the loss, or an output with .loss (a model of transformers needs a batch "
        "that is a dict with labels); or pass loss_fn(output, labels) -> loss"
    )


def test_a_model_that_returns_parts_of_a_loss() -> None:
    def forward(self: Model, x: Tensor) -> dict[str, Tensor]:
        return {"kl": self.layer(x).mean(), "rec": x.mean()}

    assert refusal(forward) == (
        "model: it returns a dict, not a scalar loss\n"
        "  fix: return the loss, or an output with .loss (a model of transformers needs a batch "
        "that is a dict with labels); or pass loss_fn(output, labels) -> loss; of a dict of "
        "losses, sum(losses.values())"
    )


@pytest.mark.parametrize(
    ("name", "total"), [("loss", 'losses["loss"]'), ("kl", "sum(losses.values())")]
)
def test_a_loss_function_that_returns_no_loss(name: str, total: str) -> None:
    model = Model(lambda self, x: self.layer(x))

    with pytest.raises(CaptureError) as caught:
        capture(model, lambda y, target: {name: y.mean()}, (torch.randn(4, 8), 0))

    assert str(caught.value) == (
        "loss_fn: it returns a dict, not a scalar loss\n"
        "  fix: return one floating-point number, such as a mean over the microbatch; of a dict "
        f"of losses, {total}"
    )


@pytest.mark.parametrize("number", [lambda y: y.mean().item(), lambda y: float(y.shape[0])])
def test_a_loss_that_is_a_number_of_python(number: Callable[[Tensor], float]) -> None:
    model = Model(lambda self, x: self.layer(x))

    with pytest.raises(CaptureError, match=r"a number of Python[^$]*leave out \.item\(\)"):
        capture(model, lambda y, target: number(y), (torch.randn(4, 8), 0))


def test_a_loss_without_parameters() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        y = self.layer(x).detach()
        return (x + y).mean()

    assert refusal(forward) == (
        "line 2: the loss depends on no parameter that requires a gradient\n"
        "  fix: check for detach(), no_grad() and requires_grad_(False) before the loss"
    )


def test_a_region_inside_a_region_of_the_same_name() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"), annotate("PP"):
            return self.layer(x).mean()

    assert refusal(forward) == (
        'annotate("PP"): a PP region is inside another PP region\n'
        "  fix: use another name for the inner one, or end the outer one first"
    )


def test_tensors_that_the_model_does_not_know() -> None:
    other = nn.Linear(8, 8)

    def forward(self: Model, x: Tensor) -> Tensor:
        y = self.layer(x)
        return other(y).mean()

    assert refusal(forward) == (
        "line 2: the loss or the model uses a parameter that is not one of the model, so nothing "
        "would train it\n"
        "  fix: if nothing shall train it, as a teacher, write teacher.requires_grad_(False); "
        "otherwise make it a parameter of the model: put a loss with its own parameters into the "
        "model, give the labels to the model, too, and return the loss (loss_fn=None)"
    )


def by_closure(model: Model) -> Callable[..., Tensor]:
    return lambda output, _: output.mean() + sum(one.square().sum() for one in model.parameters())


def by_a_layer(model: Model) -> Callable[..., Tensor]:
    return lambda output, target: output.mean() + model.layer(target).mean()


def by_a_list(model: Model) -> Callable[..., Tensor]:
    kept = [model.layer.weight]
    return lambda output, _: output.mean() + kept[0].norm()


def by_an_argument(model: Model) -> Callable[..., Tensor]:
    return lambda output, _, weight=model.layer.weight: output.mean() + weight.norm()


@pytest.mark.parametrize("make", [by_closure, by_a_layer, by_a_list, by_an_argument])
def test_a_loss_that_reads_parameters_of_the_model(make: Callable[..., Any]) -> None:
    model, batch = Model(lambda self, x: self.layer(x)), (torch.randn(4, 8), torch.randn(4, 8))

    with pytest.raises(CaptureError, match="reads layer.weight of the model by another path") as it:
        capture(model, make(model), batch)
    assert "return what the loss needs of it beside the output" in str(it.value)


class Items(dict[str, Any]):
    """Its items are its attributes. It raises a KeyError where Python wants an AttributeError."""

    __getattr__ = dict.__getitem__


def test_a_dict_whose_items_are_attributes_is_no_obstacle() -> None:
    model = Model(lambda self, x: (self.layer(x) * self.settings.inner.scale).mean())
    model.settings = Items(inner=Items(scale=2.0), locks=[Items()])

    captured = capture(model, None, (torch.randn(4, 8),))

    assert captured.model.regions
    assert model.settings == {"inner": {"scale": 2.0}, "locks": [{}]}


def test_a_forward_that_changes_parameters() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.bias.zero_()
        return self.layer(x).mean()

    assert refusal(forward) == (
        "model: the forward pass changes the parameters layer.bias\n"
        "  fix: make them buffers: `module.register_buffer(name, "
        "module._parameters.pop(name).detach())`"
    )


def test_a_buffer_that_one_region_changes_and_another_reads() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            with annotate("PP"):
                x = self.layer(x) + self.seen
            with annotate("PP"):
                self.seen += 1
                return self.layer(x).mean()

    with pytest.raises(CaptureError) as caught:
        capture(Shared(), None, (torch.randn(4, 8),))

    assert str(caught.value) == (
        "model: the buffer seen is updated in PP1 and also used in PP0\n"
        "  fix: use it in one region only, or register one buffer for each"
    )


def test_arguments_of_unknown_type() -> None:
    def forward(self: Model, x: object) -> Tensor:
        return self.layer(torch.zeros(8)).mean()

    assert refusal(forward, object()) == (
        "example: an argument holds an object\n"
        "  fix: pass tensors, numbers, strings, and lists, tuples or dicts of these"
    )


def test_an_example_that_is_no_tuple() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(nn.Linear(8, 8), None, torch.randn(4, 8))  # type: ignore[arg-type]

    assert str(caught.value) == (
        "example: it is a Tensor, not a tuple\n"
        "  fix: pass the arguments of one microbatch as a tuple: example=(tokens, labels)"
    )


def test_a_model_that_cannot_be_copied() -> None:
    model = Model(lambda self, x: self.layer(x).mean())
    model.stuck = iter_forever()

    with pytest.raises(CaptureError) as caught:
        capture(model, None, (torch.randn(4, 8),))

    assert str(caught.value) == (
        "Model: model.stuck cannot be copied: cannot pickle 'generator' object\n"
        "  fix: keep what cannot be copied (locks, streams, files, queues, generators, process "
        "groups) in a global, and not in attributes of modules; a class with its own `__getattr__` "
        "must raise AttributeError for names that it does not have"
    )


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    with pytest.raises(CaptureError) as caught:
        capture(nn.Linear(8, 8), None, (torch.randn(4, 8),), device="cuda")

    assert str(caught.value) == (
        "device: capture for cuda needs a cuda device, but there is none\n"
        '  fix: capture where the model will run, or for device="cpu"'
    )


def test_modules_that_do_not_exist() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model.head = nn.Linear(8, 8)

    with pytest.raises(CaptureError) as caught:
        tag(model, "PP", [["0"], ["1", "haed"]])

    assert str(caught.value) == ('tag("PP"): the model has no module haed\n  fix: use one of head')


def test_a_batch_that_differs_in_structure() -> None:
    model = Model(lambda self, x, n: self.layer(x).mean() * n)
    captured = capture(model, None, (torch.randn(4, 8), 2))

    with pytest.raises(InputError) as caught:
        captured.inputs.flatten((torch.randn(4, 8), 3))

    assert str(caught.value) == (
        "batch: argument 1 is 3, but the model was captured with 2\n"
        "  fix: pass it as a tensor if it changes, or capture again"
    )
    with pytest.raises(InputError, match="its structure is"):
        captured.inputs.flatten((torch.randn(4, 8), [3]))


def test_the_model_works_as_before_after_a_refusal() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        with annotate("PP"):
            y = self.layer(x)
            return y.mean() if y.sum() > 0 else -y.mean()

    model = Model(forward)
    tag(model, "EP", [["layer"]])
    with pytest.raises(CaptureError):
        capture(model, None, (torch.randn(4, 8),))

    model(torch.randn(4, 8)).backward()

    assert model.layer.weight.grad is not None
    assert not model.layer._forward_hooks


def iter_forever():
    while True:
        yield 0


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "vmap": lambda layer, x: torch.vmap(lambda row: row @ layer.weight)(x),
    "grad": lambda layer, x: torch.func.grad(lambda y: layer(y).square().sum())(x),
    "jvp": lambda layer, x: torch.func.jvp(lambda y: y @ layer.weight, (x,), (x,))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func(transform: Callable[..., Tensor]) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return transform(self.layer, x).mean()

    assert refusal(forward).endswith(
        "torch.vmap and other transforms of torch.func are not supported: a trace misses them\n"
        "  fix: write it with operators of torch that take whole batches (torch.bmm, "
        "torch.einsum, broadcasting); or make it an operator with torch.library.custom_op and "
        "register_autograd"
    )


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["random", "numpy"])
def test_numbers_drawn_outside_of_torch(draw: Callable[[], float]) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return (self.layer(x) if draw() < 0.5 else x).mean()

    assert refusal(forward) == f"model: {DRAWN}"


DRAWN = (
    "its forward draws random numbers from Python or numpy, which a captured step would not repeat"
    "\n  fix: draw with torch.rand and keep the decision in tensors, or draw in the loader and "
    "pass the result with the batch; SpecAugment of Hugging Face models: "
    "config.apply_spec_augment = False"
)
DRAWS: dict[str, Callable[[], float]] = {
    "random": lambda: random.uniform(0, 1),
    "integers": lambda: random.randint(0, 1),
    "numpy": lambda: numpy.random.rand(),
    "choice": lambda: numpy.random.choice([0, 1]),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_line_that_draws_outside_of_torch(draw: Callable[[], float]) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return (self.layer(x) if draw() < 0.5 else x).mean()

    with pytest.raises(CaptureError) as found:
        capture(Model(forward), None, (torch.randn(4, 8),))

    line = draw.__code__.co_firstlineno
    assert str(found.value) == f"test_refusals.py:{line}: {DRAWN}"


def test_modules_that_torch_jit_compiled() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.jit.script(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x).mean()

    with pytest.raises(CaptureError) as found:
        capture(Scripted(), None, (torch.randn(4, 8),))

    assert str(found.value) == (
        "module part: torch.jit has compiled it, and a trace cannot see inside\n"
        "  fix: give the Trainer the module itself, and compiled=True"
    )


def test_parameters_that_another_library_divided() -> None:
    class DTensor(torch.Tensor):
        """Stands for torch's own, which needs process groups."""

    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8).as_subclass(DTensor))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).mean()

    with pytest.raises(CaptureError, match="parameter weight: it is a DTensor"):
        capture(Divided(), None, (torch.randn(4, 8),))


LOOKUPS = (
    lambda i, w: nn.functional.embedding(i, w, scale_grad_by_freq=True),
    lambda i, w: nn.Embedding(8, 8, scale_grad_by_freq=True, _weight=w)(i),
    lambda i, w: nn.functional.embedding_bag(i, w, mode="sum", scale_grad_by_freq=True),
    lambda i, w: nn.functional.embedding_bag(
        i.flatten(), w, torch.arange(4), mode="sum", scale_grad_by_freq=True, padding_idx=0
    ),
)


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_gradients_that_depend_on_other_rows(lookup: Callable[..., Tensor]) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return lookup(x.argsort(1), self.layer.weight).mean()

    assert "scale_grad_by_freq=False" in refusal(forward)


def test_sparse_tensors() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.layer.weight.to_sparse(), x.T).mean()

    assert "sparse tensors are not supported" in refusal(forward)
