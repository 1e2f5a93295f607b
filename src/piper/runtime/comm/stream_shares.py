"""A stream's share of a GPU: SMs for compute, CTA limits and priorities for NCCL."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from piper.errors import StrategyError
from piper.names import COMPUTE, HIGH, Share
from piper.plan.instructions import Plan
from piper.runtime.hardware import SHARED
from piper.runtime.torch_private import set_timeout

LOG = logging.getLogger("piper")


@contextmanager
def on_compute_stream(plan: Plan, device: torch.device) -> Iterator[None]:
    """Run what is queued inside on the compute stream that the strategy asks for, if any.

    That work starts after everything queued before, and everything queued later waits for it. So
    memory may pass from one stream to the other.
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
    outside, stream = torch.cuda.current_stream(), compute_stream(share, device)
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        yield
    outside.wait_stream(stream)


@cache
def note_that_shares_are_ignored() -> None:
    LOG.warning("shares of SMs and priorities of streams only apply to GPUs: ignored on the CPU")


def possible(compute: Share) -> Share:
    """CUDA cannot divide SMs again that MPS has divided between the processes of a run."""
    if compute.sms is None or SHARED not in os.environ:
        return compute
    note_that_sms_are_ignored()
    return replace(compute, sms=None)


@cache
def note_that_sms_are_ignored() -> None:
    LOG.warning("processes share this GPU, so compute gets all SMs of its process: sms is ignored")


def share_of(streams: Sequence[Share], name: str) -> Share:
    """The share of a stream. A stream that the strategy does not mention has no limits."""
    return next((share for share in streams if share.stream == name), Share(name))


def priority_of(share: Share) -> int:
    """As CUDA counts: a lower number is a higher priority."""
    return -1 if share.priority == HIGH else 0


@cache
def compute_stream(share: Share, device: torch.device) -> torch.cuda.Stream:
    """Made once: a process has one compute partition of its GPU."""
    if share.sms is None:
        return torch.cuda.Stream(device, priority=priority_of(share))
    refuse_too_many(share, torch.cuda.get_device_properties(device).multi_processor_count)
    try:
        stream: torch.cuda.Stream = green_context(share.sms, device.index).Stream()
        return stream
    except (AttributeError, RuntimeError) as error:
        raise StrategyError.of(
            "stream",
            f"torch {torch.__version__} cannot limit compute to some of the SMs: {error}",
            'use torch 2.11 or later and CUDA 12.8 or later, or leave out Stream("compute")',
        ) from error


@cache
def green_context(sms: int, device: int) -> Any:
    """A green context with some SMs of a GPU. Cached, because its streams end with it.

    Work is queued on its stream. Making it the current context would not last: every call of NCCL
    sets the device, and with it the context.
    """
    from torch.cuda.green_contexts import GreenContext

    return GreenContext.create(num_sms=sms, device_id=device)


def refuse_too_many(share: Share, there: int) -> None:
    if share.sms is not None and share.sms > there:
        raise StrategyError.of(
            "stream",
            f"{share.stream} asks for {share.sms} SMs, but the GPU has {there}",
            f"write sms={there} or less",
        )


def nccl_options(share: Share, paired: bool = False) -> dict[str, int | bool]:
    """The share as NCCL's options. One CTA of NCCL takes one SM.

    Point-to-point messages (`paired`), which all-to-all is made of, use a power of two of CTAs.
    NCCL rounds the limit up, which would exceed it, so it is rounded down here.
    """
    found: dict[str, int | bool] = {"is_high_priority_stream": share.priority == HIGH}
    if share.sms is not None:
        found["max_ctas"] = 1 << share.sms.bit_length() - 1 if paired else share.sms
    return found


FEW = 4  # CTAs of a point-to-point communicator, unless the strategy or the user says otherwise


def few_ctas(share: Share) -> Share:
    """A share for messages between two devices, which wait for each other on SMs of both.

    Whatever a strategy or the environment says about CTAs stays.
    """
    said = share.sms is not None or "NCCL_MAX_CTAS" in os.environ or "NCCL_MIN_CTAS" in os.environ
    return share if said else replace(share, sms=FEW)


def group_options(share: Share, timeout: timedelta, paired: bool = False) -> dict[str, Any]:
    """Arguments of `dist.new_group` for this stream's communicators.

    If a group has several backends, the options go to NCCL; gloo has none. They contain a timeout
    too, and torch warns if it differs from the group's, so both are the same.
    """
    if share == Share(share.stream):
        return {"timeout": timeout}
    options = dist.ProcessGroupNCCL.Options()
    set_timeout(options, timeout)
    for name, value in nccl_options(share, paired).items():
        setattr(options.config if name == "max_ctas" else options, name, value)
    return {"pg_options": options, "timeout": timeout}
