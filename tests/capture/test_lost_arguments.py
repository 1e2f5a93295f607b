"""A function of torch gives modes all its arguments, or Piper sees to it."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Iterator
from functools import partial
from types import ModuleType

import pytest
import torch
from plain_loop import plain_losses
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import piper
import piper.capture  # which adds what torch loses

KNOWN = {"chain_matmul.out", "l1_loss.weight"}  # a name that torch refuses, and what Piper adds
SGD = partial(torch.optim.SGD, lr=0.1)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def names(nodes: list[ast.expr]) -> set[str]:
    found = (name for node in nodes for name in ast.walk(node))
    return {name.id for name in found if isinstance(name, ast.Name)}


def lost(module: ModuleType) -> Iterator[str]:
    """Arguments of the module's functions that these do not give to `handle_torch_function`."""
    tree = ast.parse(inspect.getsource(module))
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for call in ast.walk(function):
            match call:
                case ast.Call(func=ast.Name("handle_torch_function")):
                    given = names([*call.args[2:], *(word.value for word in call.keywords)])
                    # einsum packs its operands anew, under the names that follow
                    yield from (f"{function.name}.{a.arg}" for a in arguments if a.arg not in given)


@pytest.mark.parametrize("module", [functional, torch.functional], ids=lambda m: m.__name__)
def test_no_function_of_torch_loses_an_argument_that_is_not_known(module: ModuleType) -> None:
    assert set(lost(module)) <= KNOWN


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_reach_the_function_through_modes(reduction: str) -> None:
    x, y, weight = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0))
    loss = partial(functional.l1_loss, x, y, reduction=reduction, weight=weight)

    wanted = loss()
    with Mode(), Mode():
        found = loss()

    assert torch.equal(found, wanted)


def test_a_script_of_torch_compiles_as_before() -> None:
    scripted = torch.jit.script(nn.L1Loss())

    assert scripted(torch.zeros(2), torch.ones(2)) == 1


def test_a_weighted_loss_trains_with_its_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.rand, generator=generator, dtype=torch.float64)
    batches = [(draw(8, 3), (draw(8, 2), 4 * draw(8, 2))) for _ in range(3)]
    model = nn.Linear(3, 2).double()
    alone = copy.deepcopy(model)

    def loss_fn(output: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
        return functional.l1_loss(output, labels[0], weight=labels[1].round() + 1, reduction="sum")

    wanted = plain_losses(SGD(alone.parameters()), batches, lambda x, y: loss_fn(alone(x), y))
    strategy = piper.Strategy([piper.Place(piper.where(), [0]), piper.Split("MB", 2)])
    found = piper.rehearse(model, loss_fn, strategy, batches, optimizer=SGD, reduction="sum")

    assert found.losses == pytest.approx(wanted, rel=1e-12)
