"""State for programs that only read: it lies in the memory of the state that is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from piper.errors import InputError
from piper.plan.instructions import State
from piper.runtime.state.device_state import (
    BucketState,
    DeviceState,
    Named,
    element_orders,
    held_pieces,
    make_bucket,
    on_device,
)
from piper.runtime.state.offloaded_optimizer import place

NOT_TRAINED = partial(torch.optim.SGD, lr=0.0)


def shared_state(
    trained: DeviceState,
    states: Iterable[State],
    contents: Mapping[str, Sequence[Named]],
    trainable: Callable[[str], bool],
    initial: Callable[[str], torch.Tensor],
) -> DeviceState:
    """The buckets of a plan, as views of those that are trained.

    In eval mode, a region may use fewer parameters or buffers than in training. What training never
    uses has its initial value.
    """
    found = DeviceState(trained.device, buffers=trained.buffers)
    for state in states:
        content = contents[state.bucket]
        one = view_of(trained, state, content)
        if one is not None and one.on_host != state.on_host:
            raise InputError.of(
                "model",
                f"in eval mode, another region uses {', '.join(one.names)[:80]} first than in "
                "training, and `Offload` matches only one of the two",
                'match both with Offload(..., "parameters"), or none',
            )
        if one is None:
            here = partial(on_device, initial, trained.device)
            one = make_bucket(state, content, trainable(state.bucket), here, NOT_TRAINED)
            if trained.origin is not None:
                trained.origin.fill(one)
            place(one, replace(state, host=False), trained.device)
        found.buckets[state.value] = one
    return found


def view_of(trained: DeviceState, state: State, content: Sequence[Named]) -> BucketState | None:
    """The memory of these parameters. None: this device trains none of them."""
    names = [name for name, _, _ in content]
    sharing = {k: b for k, b in trained.buckets.items() if not set(names).isdisjoint(b.names)}
    if not sharing:
        return None
    own = [sharing[k] for k in sorted(sharing, key=lambda k: k != state.value)]
    fitting = (one for one in own if set(names) <= set(one.names))
    for bucket in fitting:
        if is_whole(state) and bucket.pieces is None:
            return some_of(bucket, names)
        if not is_whole(state) and is_same_shard(bucket, state, content):
            return bucket
    raise InputError.of(
        "model",
        f"in eval mode, it uses {', '.join(sorted(names))[:80]} together in one region; in "
        "training it does not",
        "use the same parameters in both modes, or evaluate model.load_state_dict("
        "trainer.state_dict())",
    )


def is_whole(state: State) -> bool:
    return state.ways == 1 and state.shares == 1


def some_of(bucket: BucketState, names: Sequence[str]) -> BucketState:
    where = [bucket.names.index(name) for name in names]
    return replace(
        bucket,
        names=tuple(names),
        shapes=tuple(bucket.shapes[k] for k in where),
        tensors=tuple(bucket.tensors[k] for k in where),
        parameters=tuple(bucket.parameters[k] for k in where),
        optimizer=None,
        scheduler=None,
    )


def is_same_shard(bucket: BucketState, state: State, content: Sequence[Named]) -> bool:
    """Whether the same elements lie in the same places."""
    numels = [torch.Size(shape).numel() for _, shape, _ in content]
    return (
        bucket.names == tuple(name for name, _, _ in content)
        and bucket.pieces == tuple(held_pieces(state, numels))
        and bucket.orders == tuple(element_orders(state, len(numels)))
    )
