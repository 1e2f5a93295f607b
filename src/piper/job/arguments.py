"""Check the arguments of a Trainer. Errors say what to write instead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from inspect import Signature, signature
from typing import Any, ParamSpec, TypeVar, get_args

import torch
from torch.optim.lr_scheduler import LRScheduler

from piper.capture.trace.side_effects import refuse_unready
from piper.directives.strategy import Strategy, as_strategy
from piper.errors import InputError, Located, Problem, StrategyError, no_option
from piper.job.batch.batch import Batch
from piper.job.other_words import elsewhere, to_make_again, to_schedule_again
from piper.launcher.script_errors import own_frames
from piper.names import amount
from piper.runtime.optimizers.parameter_groups import is_named
from piper.strategies import BUILDERS
from piper.strategies.other_names import configured, named

Given = ParamSpec("Given")
Made = TypeVar("Made")
EXAMPLE = "write example=(x, y): one batch as `step` gets it"
EXAMPLES = {
    "from_pretrained": 'write example={"input_ids": ids, "labels": ids}: one batch as `step` gets '
    "it, such as next(iter(loader))",
}
OWN_LOSS = "None if the model returns its own loss"
CALLS = {
    "evaluate": "it takes batches: write trainer.evaluate([(x, y)])",
    "Trainer": "write Trainer(model, loss_fn, strategy, example=...), and options by name; loss_fn "
    "may be None if the model computes its loss, and strategy for one device",
}
NUMBERED = "leave it out: a checkpoint has the number of its step, which is trainer.steps"
TYPE = (
    "leave it out: weights are written in the type that they have; load them in another one, as in "
    "from_pretrained(folder, dtype=torch.bfloat16)"
)
OF_CALLS: dict[str, dict[str, str]] = {  # methods of a Trainer, and their options elsewhere
    "save": dict.fromkeys(("step", "steps", "epoch", "global_step", "tag"), NUMBERED)
    | dict.fromkeys(("max_to_keep", "save_total_limit", "keep_last"), "write keep=..."),
    "export": dict.fromkeys(("dtype", "torch_dtype", "precision"), TYPE),
    "save_pretrained": dict.fromkeys(("dtype", "torch_dtype", "precision"), TYPE),
    "load": {"map_location": "leave it out: each process loads what it holds"},
    "resume": {"step": "give one of the folders in it, such as trainer.resume('run/step-100')"},
    **{name: {} for name in ("evaluate", "record", "retarget", "gather", "close")},
}
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
LOG = logging.getLogger("piper")


def names_options(call: Callable[Given, Made]) -> Callable[Given, Made]:
    """Suggest an option for a misspelt name, where Python would only say that it is unknown.

    Errors that say what to write instead have short tracebacks: the user's own lines.

    The signature stays as it is written: type checkers and `help` see every option.
    """
    shape = signature(call)
    known: Mapping[str, Any] = shape.parameters
    named = [one for one in shape.parameters.values() if one.kind is one.KEYWORD_ONLY]
    options = [one.name for one in sorted(named, key=lambda one: one.default is one.empty)]
    options += [name for name in shape.parameters if name not in (*options, "self")]
    owner, _, own = call.__qualname__.rpartition(".")
    where = owner if own == "__init__" else own
    more = options_passed_on(call)
    any_name = not more and any(one.kind is one.VAR_KEYWORD for one in shape.parameters.values())
    if more:
        options = [*(name for name in options if name != "options"), *more]
        known = {**known, **dict.fromkeys(more)}

    @wraps(call)
    def checked(*args: Given.args, **given: Given.kwargs) -> Made:
        for name in given:
            if name not in known and not any_name:
                raise InputError(where, unknown(name, options, given, where))
        refuse_unbound(where, shape, args, given)
        try:
            return call(*args, **given)
        except Located as error:  # says all: Piper's own lines would hide it, and the user's
            error.__traceback__ = own_frames(error.__traceback__)
            raise

    return checked


def options_passed_on(call: Callable[..., Any]) -> list[str]:
    """Those of `**options: Unpack[...]`, by name."""
    shape = signature(call)
    if not any(one.kind is one.VAR_KEYWORD for one in shape.parameters.values()):
        return []
    *_, last = signature(call, eval_str=True).parameters.values()
    return [name for kind in get_args(last.annotation) for name in kind.__annotations__]


def given_strategy(strategy: Any, devices: int = 1) -> Strategy:
    """A strategy from what the user gave, who may know how other systems are configured."""
    if isinstance(strategy, str):
        fix = named(strategy, BUILDERS)
        raise StrategyError.of("strategy", f"it is a string, {strategy!r}", fix)
    if isinstance(strategy, Mapping):
        what = "it is a dict, as other systems are configured"
        raise StrategyError.of("strategy", what, configured(strategy))
    return as_strategy(strategy, devices)


def unknown(name: str, options: Sequence[str], given: Mapping[str, Any], where: str) -> Problem:
    fix = OF_CALLS[where].get(name) if where in OF_CALLS else elsewhere(name, given)
    return Problem(f"it has no option {name}", fix) if fix else no_option("it", name, options)


def refuse_unbound(where: str, shape: Signature, args: Any, given: dict[str, Any]) -> None:
    """Arguments that are missing, or given twice."""
    for one in shape.parameters.values():
        if one.kind is one.KEYWORD_ONLY and one.default is one.empty and one.name not in given:
            call = f"write {called(where)}(..., {one.name}=...)"
            fix = EXAMPLES.get(where, EXAMPLE) if one.name == "example" else call
            raise InputError.of(where, f"{one.name}= is missing", fix)
    try:
        shape.bind(*args, **given)
    except TypeError as error:
        first = [one.name for one in shape.parameters.values() if one.kind is not one.KEYWORD_ONLY]
        names = ", ".join(name for name in first if name != "self")
        fix = f"write {called(where)}({names}, ...), and options by name"
        raise InputError.of(where, str(error), CALLS.get(where, fix)) from None


def called(where: str) -> str:
    """
    >>> called("save"), called("rehearse")
    ('trainer.save', 'rehearse')
    """
    return f"trainer.{where}" if where in OF_CALLS else where


def refuse_wrong_model(model: Any, loss_fn: Any) -> None:
    refuse_class("model", model, "...")
    refuse_class("loss_fn", loss_fn, "")
    if not isinstance(model, torch.nn.Module):
        swapped = "they are exchanged: " * isinstance(loss_fn, torch.nn.Module)
        raise no("model", model, f"{swapped}give the model first, and then loss_fn")
    refuse_wrapped(model)
    refuse_unready(model)
    if isinstance(loss_fn, Strategy | Mapping | list | tuple | str):
        what = (
            f"it is of type {type(loss_fn).__name__}, as a strategy: loss_fn seems to be left out"
        )
        fix = (
            f"write Trainer(model, loss_fn, strategy, ...): loss_fn comes second, and is {OWN_LOSS}"
        )
        raise InputError.of("loss_fn", what, fix)
    if loss_fn is not None and not callable(loss_fn):
        raise no("loss_fn", loss_fn, f"give a function of (output, labels), or {OWN_LOSS}")


def refuse_class(name: str, given: Any, arguments: str) -> None:
    if isinstance(given, type):
        fix = f"write {given.__name__}({arguments}), with the parentheses"
        raise InputError.of(name, f"it is the class {given.__name__}", fix)


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Wrappers have parameters and a forward of their own."""
    found = next((one for one in type(model).__mro__ if one.__name__ in WRAPPERS), None)
    if found is not None:
        what = f"it is in a {found.__name__}, which does what a strategy does here"
        fix = (
            "give the model itself (model.module), and a strategy with dp=..., and zero=3 for FSDP"
        )
        raise InputError.of("model", what, fix)


def refuse_synchronised_norms(model: torch.nn.Module, replicas: int) -> None:
    """Replicas exchange nothing in the middle of a forward."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm) and module.training and replicas > 1:
            raise InputError.of(
                "model",
                f"{name} is a SyncBatchNorm, and statistics over {replicas} replicas are not "
                "supported",
                "use BatchNorm, which normalises each microbatch of each replica by itself, as "
                "DistributedDataParallel does; or GroupNorm or LayerNorm",
            )


def refuse_wrong_options(optimizer: Any, lr_scheduler: Any, max_norm: Any) -> None:
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise no("optimizer", optimizer, to_make_again(optimizer))
    made = isinstance(lr_scheduler, LRScheduler)
    if made or not (lr_scheduler is None or callable(lr_scheduler)):
        raise no("lr_scheduler", lr_scheduler, to_schedule_again(lr_scheduler))
    if max_norm is not None and not is_norm(max_norm):
        raise InputError.of(
            "max_norm", f"{max_norm!r} is not a norm", "write a number above 0, or None"
        )


def refuse_unmatched(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Misspelt patterns would silently change nothing.

    One list may serve many models: some have no biases.
    """
    names = [name for name, _ in model.named_parameters()]
    missed = [one for one in patterns if not any(is_named(name, [one]) for name in names)]
    words = " or ".join(map(repr, missed))
    if missed and len(missed) == len(patterns):
        what = f"no parameter has {words} in its name"
        fix = f"the model has {', '.join(names[:3])}, ...: write a part of such a name"
        raise InputError.of("no_decay", what, fix)
    if missed:
        warn_unmatched(words)


@lru_cache(maxsize=64)
def warn_unmatched(words: str) -> None:
    """Once: a Trainer makes several jobs, of copies of its model."""
    LOG.warning("no_decay: no parameter has %s in its name", words)


def refuse_wrong_memory(found: Any) -> None:
    if found is not None and not is_norm(found):
        fix = "write GiB of one device, such as 80, or None"
        raise InputError.of("memory_gib", f"{found!r} is not an amount of memory", fix)


def refuse_wrong_ema(decay: Any) -> None:
    if decay is None:
        return
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        fix = "write a number from 0 to below 1, such as 0.999, or None"
        raise InputError.of("ema", f"{decay!r} is not a decay", fix)


def refuse_wrong_graphs(graphs: Any) -> None:
    if not isinstance(graphs, bool) and graphs != "auto":
        raise InputError.of("graphs", f"there is no {graphs!r}", 'write True, False or "auto"')


def refuse_wrong_count(name: str, found: Any) -> None:
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise InputError.of(name, f"{found!r} is not a count", "write a whole number above 0")


def is_norm(found: Any) -> bool:
    """
    >>> is_norm(1), is_norm(torch.tensor(0.5)), is_norm("1.0"), is_norm(True), is_norm(-1.0)
    (True, True, False, False, False)
    """
    try:
        return not isinstance(found, str | bool) and float(found) > 0
    except (TypeError, ValueError):
        return False


def counting_arguments(make: Callable[[], Made], batch: Batch, count: int) -> Made:
    """Call `make`. If it fails and the batch has another number of arguments, say so."""
    try:
        return make()
    except TypeError as error:
        given = batch.arguments
        if len(given) == count:
            raise
        what = (
            f"step was given {amount(len(given), 'argument')}, but the example has {count}: {error}"
        )
        raise InputError.of("batch", what, "give step what the example has") from error


def no(name: str, found: Any, fix: str) -> InputError:
    kind = "None" if found is None else f"of type {type(found).__name__}"
    made = isinstance(found, torch.optim.Optimizer | LRScheduler)
    return InputError.of(name, f"it is {kind}{', already made' * made}", fix)
