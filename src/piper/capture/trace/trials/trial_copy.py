"""A copy of a model and its loss on which trials run, each as if it were the first."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from piper.capture.python_state.function_caches import forgetting
from piper.capture.python_state.leaves import SETS, SIMPLE, Token, token
from piper.capture.python_state.loss_state import Loss, copied, reach_of_both
from piper.capture.python_state.places import Walk, is_leaf
from piper.capture.python_state.reach import Reach
from piper.capture.python_state.snapshot import Snapshot
from piper.capture.torch_private import checkpoints_as, own_buffers
from piper.capture.trace.model_copy import acting_as, throw_away


@dataclass(frozen=True)
class TrialCopy:
    """Making one takes longer than a run of a small model, so several runs share it."""

    model: nn.Module
    view: nn.Module
    loss_fn: Loss | None
    dtype: torch.dtype | None
    before: Snapshot
    leaves: list[tuple[Any, Token]]  # what can change inside, and is not put back
    registered: list[int]

    @staticmethod
    def of(model: nn.Module, loss_fn: Loss | None, dtype: torch.dtype | None) -> "TrialCopy":
        view, call = throw_away(model, loss_fn), copied(loss_fn, model)
        if isinstance(call, nn.Module) and call is not loss_fn and dtype is not None:
            convert_buffers(call, dtype, set(model.modules()))
        with acting_as(model, view):
            reach = reach_of_both(view, call)
            found = Snapshot(reach), leaves_of(reach), registered(view)
        return TrialCopy(model, view, call, dtype, *found)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Python state, function caches, random numbers and the default type are as before,
        afterwards.

        Constants of the model are of this type too, so that they do not limit its digits. What is
        in a checkpoint is not recomputed: in the backward, it would be with other random numbers.
        """
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype or torch.get_default_dtype())
            stack.enter_context(forgetting())
            stack.enter_context(checkpoints_as(nullcontext))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(acting_as(self.model, self.view))
            stack.callback(self.before.restore)
            yield

    def is_as_before(self) -> bool:
        """Whether a run has left it as it was. What is not known may have changed."""
        return registered(self.view) == self.registered and all(
            token(value) == was and is_known(value, was) for value, was in self.leaves
        )


def convert_buffers(loss: nn.Module, dtype: torch.dtype, others: set[nn.Module]) -> None:
    """Those of the loss alone: it shares its parameters, and a model that it holds."""
    for module in set(loss.modules()) - others:
        held = own_buffers(module)
        for name, buffer in held.items():
            if buffer is not None and buffer.is_floating_point():
                held[name] = buffer.to(dtype)


def leaves_of(reach: Reach) -> list[tuple[Any, Token]]:
    """Values that can change, of the model and of its loss."""
    found = (place.value for place in Walk().of(reach.roots[:2]))
    return [(one, token(one)) for one in found if is_leaf(one) and type(one) not in SIMPLE]


def is_known(value: Any, found: Token) -> bool:
    """Whether a token says more than the class. An empty set has no more to say."""
    return len(found) > 1 or isinstance(value, SETS)


def registered(model: nn.Module) -> list[int]:
    return [id(one) for one in (*model.parameters(), *model.buffers())]
