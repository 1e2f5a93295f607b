"""What the streams of a strategy get of a GPU: limits and priorities for NCCL, SMs for compute."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from piper.errors import Problem, StrategyError
from piper.names import COMPUTE, HIGH, Share
from piper.plan.instructions import Plan
from piper.runtime.hardware import SHARED
from piper.runtime.torch_private import timeout_of

LOG = logging.getLogger("piper")


@contextmanager
def compute_lane(plan: Plan, device: torch.device) -> Iterator[None]:
    """What is queued inside runs on the compute stream that the strategy asks for, if it does.

    It begins when all that is queued now has ended, and whatever is queued later waits for it: so
    memory may go from one stream to the other.
    """
    if device.type != "cuda":
        if plan.streams and plan.device == 0:
            note_that_shares_are_ignored()
        yield
        return
    share = possible(share_of(plan.streams, COMPUTE))
    if share == Share(COMPUTE):
        yield
        return
    outside, lane = torch.cuda.current_stream(), compute_stream(share, device)
    lane.wait_stream(outside)
    with torch.cuda.stream(lane):
        yield
    outside.wait_stream(lane)


@cache
def note_that_shares_are_ignored() -> None:
    LOG.warning("streams' shares of SMs and priorities are for GPUs: ignored on the CPU")


def possible(compute: Share) -> Share:
    """CUDA does not divide again what MPS has divided between the processes of a run."""
    if compute.sms is None or SHARED not in os.environ:
        return compute
    note_that_sms_are_ignored()
    return replace(compute, sms=None)


@cache
def note_that_sms_are_ignored() -> None:
    LOG.warning("compute has all SMs of its process on a GPU that processes share: sms is ignored")


def share_of(streams: Sequence[Share], name: str) -> Share:
    """What a stream gets; one that nobody mentions gets what there is."""
    return next((share for share in streams if share.stream == name), Share(name))


def priority_of(share: Share) -> int:
    """In CUDA's words: less is more."""
    return -1 if share.priority == HIGH else 0


@cache
def compute_stream(share: Share, device: torch.device) -> torch.cuda.Stream:
    """Made once: a process has one part of its GPU for compute."""
    if share.sms is None:
        return torch.cuda.Stream(device, priority=priority_of(share))
    refuse_too_many(share, torch.cuda.get_device_properties(device).multi_processor_count)
    try:
        stream: torch.cuda.Stream = green_context(share.sms, device.index).Stream()
        return stream
    except (AttributeError, RuntimeError) as error:
        raise StrategyError(
            "stream",
            Problem(
                f"torch {torch.__version__} cannot give compute a part of the SMs: {error}",
                'use torch 2.11 or later and CUDA 12.8 or later, or leave out Stream("compute")',
            ),
        ) from error


@cache
def green_context(sms: int, device: int) -> Any:
    """A part of the SMs of a GPU; kept, because its streams end with it.

    Work is queued on its stream; making it the current context instead would not last, because
    NCCL sets the device, and with it the context, whenever it is called.
    """
    from torch.cuda.green_contexts import GreenContext

    return GreenContext.create(num_sms=sms, device_id=device)


def refuse_too_many(share: Share, there: int) -> None:
    if share.sms is not None and share.sms > there:
        raise StrategyError(
            "stream",
            Problem(
                f"{share.stream} is to have {share.sms} SMs, but the GPU has {there}",
                f"write sms={there} or less",
            ),
        )


def nccl_options(share: Share, paired: bool = False) -> dict[str, int | bool]:
    """In NCCL's words, to which a CTA is an SM.

    Messages from one to another (`paired`), all-to-all among them, take a power of two of CTAs:
    NCCL rounds the limit up, which would then be none.
    """
    found: dict[str, int | bool] = {"is_high_priority_stream": share.priority == HIGH}
    if share.sms is not None:
        found["max_ctas"] = 1 << share.sms.bit_length() - 1 if paired else share.sms
    return found


def group_options(share: Share, paired: bool = False) -> dict[str, Any]:
    """What `dist.new_group` is to know of a communicator of this stream. It keeps the options.

    Where a group has several backends they go to NCCL; gloo has none. The time-out is theirs, too:
    torch warns where the two differ.
    """
    if share == Share(share.stream):
        return {}
    options = dist.ProcessGroupNCCL.Options()
    for name, value in nccl_options(share, paired).items():
        setattr(options.config if name == "max_ctas" else options, name, value)
    return {"pg_options": options, "timeout": timeout_of(options)}
