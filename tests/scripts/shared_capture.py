"""Train what was captured before: capturing takes seconds, and many tests train the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map

from piper.capture import Captured, capture
from piper.job.batch.batch import Batch
from piper.job.batch.whole_inputs import tried
from piper.job.job import Job
from piper.job.loop.recent import recent
from piper.job.loss.microbatch_trial import tried as trial

MOST = 16  # captures of which more is remembered
DIVIDED: dict[tuple[int, str], Captured] = {}  # by the whole model, and what was asked
JUDGED: dict[int, tuple[Captured, dict[str, Any]]] = {}  # by the whole model


@contextmanager
def using(found: Captured | None) -> Iterator[None]:
    """Inside, whatever is captured whole is this; None: it is captured as usual."""
    if found is None:
        yield
        return

    def known(*given: Any) -> Captured:
        """The fifth argument asks to divide regions."""
        key = id(found), repr(given[4:])
        if not any(given[4:5]):
            return found
        if key not in DIVIDED:
            DIVIDED[key] = capture(*given)
        return DIVIDED[key]

    (_, judged), _ = recent(JUDGED, id(found), lambda: (found, {}), MOST)
    capturing = patch("piper.job.job.capture", known)
    searching = patch("piper.job.compile.layer_search.tag_unannotated", lambda *_: None)
    with capturing, searching, judging_once(judged):
        yield


@contextmanager
def judging_once(known: dict[str, Any]) -> Iterator[None]:
    """Inside, what is cut into microbatches and the form of the loss are found and tried once.

    These are traces and runs, like captures. `known` is of one model.
    """
    anew = Job.form_anew

    def tried_once(model: torch.nn.Module, *given: Any) -> Any:
        return once(known, ("tried", *given), lambda: tried(model, *given))

    def form_once(job: Job, captured: Captured, one: Batch) -> Any:
        specs = tree_map(spec, one.arguments)
        about = captured.output, captured.form, specs, one.whole, job.loss_fn, job.precision
        return once(known, ("form", *about), lambda: anew(job, captured, one))

    def trial_once(runs: Any, captured: Captured, one: Batch, *given: Any) -> Any:
        about = captured.output, captured.form, tree_map(spec, one.arguments), one.whole
        return once(known, ("trial", *about, *given), lambda: trial(runs, captured, one, *given))

    judge = patch("piper.job.batch.whole_inputs.tried", tried_once)
    compare = patch("piper.job.loss.microbatch_trial.tried", trial_once)
    with judge, compare, patch("piper.job.job.Job.form_anew", form_once):
        yield


def once(known: dict[str, Any], about: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    key = repr(about)
    if key not in known:
        known[key] = make()
    return known[key]


def spec(one: Any) -> Any:
    return (one.shape, one.dtype) if isinstance(one, torch.Tensor) else one


def capturing_once() -> AbstractContextManager[Any]:
    """Inside, one model is captured once for each shape and type: strategies do not matter."""
    found: dict[str, Captured] = {}

    def known(model: torch.nn.Module, loss_fn: Any, example: Any, *given: Any) -> Captured:
        specs = tree_map(spec, example)
        key = repr((specs, [p.dtype for p in model.parameters()], given))
        if key not in found:
            found[key] = capture(model, loss_fn, example, *given)
        return found[key]

    return patch("piper.job.job.capture", known)


def one_model() -> Callable[[], AbstractContextManager[None]]:
    """A model and its loss, for many trainings: inside, they are captured and tried once."""
    capturing, judged = capturing_once(), dict[str, Any]()

    @contextmanager
    def inside() -> Iterator[None]:
        with capturing, judging_once(judged):
            yield

    return inside
