"""The user's optimizer: made for each bucket, checked, and moved to the pieces of a shard."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from piper.errors import Problem, StrategyError
from piper.runtime.comm.flat_messages import Piece
from piper.runtime.state.joint_optimizers import refuse_across

MakeOptimizer = Callable[[Iterable[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
Named = list[tuple[str, torch.nn.Parameter]]
Held = Sequence[tuple[Piece, torch.nn.Parameter]]

SCHEDULER = "write lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=1000)"
SCHEDULED = (
    "lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "max_momentum", "base_momentum",
)  # fmt: skip
ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop",
    "ASGD",
)  # fmt: skip


def make_checked(make: MakeOptimizer, named: Named) -> torch.optim.Optimizer:
    """What the user makes of these parameters; refused if it would not train just these."""
    try:
        optimizer = make(list(named))
    except TypeError as error:
        raise refused(
            f"it cannot be called with parameters: {error}",
            "write optimizer=partial(torch.optim.AdamW, lr=3e-4)",
        ) from error
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise refused(
            f"it was given {names_text(named)} and chose none of them: it is called once for each "
            "group of parameters that live together",
            "freeze what must not be trained with requires_grad_(False)",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise refused(
            f"it made {type(optimizer).__name__}, which is no torch.optim.Optimizer",
            "write optimizer=partial(torch.optim.AdamW, lr=3e-4)",
        )
    refuse_other_parameters(optimizer, named)
    refuse_hooks(optimizer, named)
    refuse_across(make, optimizer, named)
    for group in optimizer.param_groups:  # one tensor for several optimizers would change for all
        group.update({k: v.clone() for k, v in group.items() if isinstance(v, torch.Tensor)})
    return optimizer


def make_scheduler(make: MakeScheduler, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Of one of the optimizers; it is stepped with it, and so are those of all others."""
    try:
        scheduler = make(optimizer)
    except TypeError as error:
        raise StrategyError(
            "lr_scheduler", Problem(f"it cannot be called with an optimizer: {error}", SCHEDULER)
        ) from error
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise StrategyError(
            "lr_scheduler",
            Problem(
                f"it made {type(scheduler).__name__}, which does not go by the number of steps",
                f"{SCHEDULER}, or any other one that does",
            ),
        )
    if scheduler.optimizer is not optimizer:
        raise StrategyError(
            "lr_scheduler",
            Problem(
                "it made a scheduler of another optimizer than it was given",
                "make a new one at each call: each group of parameters that live together has an "
                "optimizer of its own",
            ),
        )
    return scheduler


def settings(optimizer: torch.optim.Optimizer, scheduled: bool) -> list[dict[str, Any]]:
    """Numbers of an optimizer's groups, but for those that a scheduler sets."""
    return [
        {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if not (scheduled and key in SCHEDULED) and is_number(value)
        }
        for group in optimizer.param_groups
    ]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and not value.dim())


def forward(scheduler: LRScheduler, steps: int) -> None:
    """Schedulers go by the number of steps, so the same steps bring them to the same place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        for _ in range(steps):
            scheduler.step()


def refuse_other_parameters(optimizer: torch.optim.Optimizer, named: Named) -> None:
    given = {id(parameter) for _, parameter in named}
    used = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if used - given:
        raise refused(
            f"it was given {names_text(named)}, but has other parameters than these",
            "make a new optimizer at each call, of what it is given: "
            "optimizer=lambda named: torch.optim.AdamW(named, lr=3e-4)",
        )


def refuse_hooks(optimizer: torch.optim.Optimizer, named: Named) -> None:
    """They would see a part of the gradients only, or nothing at all."""
    own = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    if any(getattr(optimizer, name, None) for name in own):
        raise refused(
            "it has step hooks, which would see some of the parameters only",
            "leave them out; to clip by the norm of all gradients, give Trainer(max_norm=...)",
        )
    theirs = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if any(getattr(parameter, name, None) for _, parameter in named for name in theirs):
        raise refused(
            "it puts hooks on gradients, which nothing would call",
            "change gradients in the optimizer's step instead",
        )


def names_text(named: Named) -> str:
    names = ", ".join(name for name, _ in named[:3])
    return f"{names} and {len(named) - 3} more" if len(named) > 3 else names


def refused(what: str, fix: str) -> StrategyError:
    return StrategyError("optimizer", Problem(what, fix))


def sharded_optimizer(make: MakeOptimizer, wholes: Named, held: Held) -> torch.optim.Optimizer:
    """What the user makes of whole parameters, then on the pieces that are here.

    The user's function sees whole parameters with their names and first values, so that what it
    makes of them is what it makes on one device. `wholes` is emptied.
    """
    optimizer = make_checked(make, wholes)
    refuse_whole_tensors(optimizer)
    move(optimizer, wholes, held)
    refuse_kept(wholes)
    return optimizer


def move(optimizer: torch.optim.Optimizer, wholes: Named, held: Held) -> None:
    """Put pieces in the place of whole parameters; what is not here is left out."""
    here = {id(wholes[piece.tensor][1]): (piece, parameter) for piece, parameter in held}
    for group in optimizer.param_groups:
        given = group["params"]
        if "param_names" in group:
            pairs = zip(given, group["param_names"], strict=True)
            group["param_names"] = [name for p, name in pairs if id(p) in here]
        group["params"] = [here[id(p)][1] for p in given if id(p) in here]
    early = [(here.get(id(p)), p.shape, state) for p, state in optimizer.state.items()]
    optimizer.state.clear()
    for found, shape, state in early:
        if found is not None:
            optimizer.state[found[1]] = cut(state, shape, found[0])


def cut(state: dict[str, Any], shape: torch.Size, piece: Piece) -> dict[str, Any]:
    """The part of an optimizer's early state that belongs to a piece."""

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == shape:
            return value.flatten()[piece.start : piece.stop].clone()
        return value

    return {key: part(value) for key, value in state.items()}


def refuse_kept(wholes: Named) -> None:
    """An optimizer that keeps parameters of its own accord would go on with the wrong ones."""
    watched = [weakref.ref(parameter) for _, parameter in wholes]
    wholes.clear()
    if any(ref() is not None for ref in watched):
        gc.collect()
    if any(ref() is not None for ref in watched):
        raise refused(
            "it keeps parameters besides those in param_groups, and zero=1, 2 and 3 give it shards "
            "(`Shard` does, too)",
            "use zero=0 and no `Shard`, or look parameters up in param_groups at each step",
        )


def refuse_whole_tensors(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer that looks at whole tensors (norms, factors) would not see them in a shard."""
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
    if not known and not getattr(kind, "elementwise", False):
        raise refused(
            f"{kind.__name__} may need whole parameters, and zero=1, 2 and 3 give it shards "
            "(`Shard` does, too)",
            "use zero=0 and no `Shard`, or one of "
            + ", ".join(ELEMENTWISE)
            + "; if it treats every element "
            "by itself, say so with the class attribute elementwise = True",
        )
