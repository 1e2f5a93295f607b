"""What streams get of a GPU, with everything that needs one made up; and that CPUs ignore it."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from piper import Place, Stream, Trainer, where
from piper.errors import StrategyError
from piper.names import Share
from piper.plan.analyse.required_communicators import RequiredCommunicators
from piper.plan.instructions import Plan
from piper.runtime.comm import nccl, stream_shares
from piper.runtime.comm.nccl import CudaComm

GPU = torch.device("cuda", 0)
FEW = stream_shares.FEW
EP, PP, DP = Share("ep", 20, "high"), Share("pp", priority="high"), Share("dp", 12)
NOTE = "shares of SMs and priorities of streams only apply to GPUs: ignored on the CPU"


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    for kept in (
        stream_shares.compute_stream,
        stream_shares.green_context,
        stream_shares.note_that_shares_are_ignored,
        stream_shares.note_that_sms_are_ignored,
    ):
        kept.cache_clear()


# NCCL


@pytest.mark.parametrize(
    ("share", "paired", "wanted"),
    [
        (DP, False, {"is_high_priority_stream": False, "max_ctas": 12}),
        (PP, True, {"is_high_priority_stream": True}),
        (EP, True, {"is_high_priority_stream": True, "max_ctas": 16}),
        (Share("ep", 16), True, {"is_high_priority_stream": False, "max_ctas": 16}),
        (Share("ep", 1), True, {"is_high_priority_stream": False, "max_ctas": 1}),
    ],
    ids=["collectives", "a priority only", "rounded down", "a power of two", "one"],
)
def test_a_share_in_the_words_of_nccl(share: Share, paired: bool, wanted: dict) -> None:
    assert stream_shares.nccl_options(share, paired) == wanted


class Options:
    """As those of ProcessGroupNCCL, which CPU builds of torch do not have."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(max_ctas=None)
        self._timeout = timedelta(seconds=600)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `dist.new_group` was asked for: ranks, backend, priority and limit."""
    asked: list[tuple[Any, ...]] = []

    def new_group(ranks: Any = None, backend: Any = None, **options: Any) -> object:
        given = options.get("pg_options")
        assert not given or options["timeout"] == given._timeout
        limits = given and (given.is_high_priority_stream, given.config.max_ctas)
        asked.append((ranks, backend, limits))
        return object()

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    return asked


class QuietComm(CudaComm):
    """Makes its groups, and sends nothing: here is no GPU."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self.groups["loss_norm"] = None
        self.sums = 0

    def first_sum(self, *_: Any) -> None:
        self.sums += 1

    def first_meeting(self, *_: Any) -> None: ...

    def first_message(self, *_: Any) -> None: ...


def test_every_communicator_has_the_options_of_its_stream(
    groups: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    team, threads = (0, 1), []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(nccl, "CudaExchangeThread", lambda *given: threads.append(given))
    needs = RequiredCommunicators(
        streams=["pp"], teams=[("dp", team), ("ep", team), ("gather", team)],
        links=[("pp", 2, 0)], token_groups=[("ep", team)], shares=(EP, PP, DP),
    )  # fmt: skip

    QuietComm().extend(needs)

    both = "cpu:gloo,cuda:nccl"
    assert groups == [
        (None, both, (True, None)),
        ([0, 1], both, (False, 12)),
        ([0, 1], both, (True, 16)),
        ([0, 1], both, None),
        ([0, 2], "nccl", (True, FEW)),
    ]
    assert threads == [("ep", -1)]


def test_the_loss_needs_a_communicator_only_where_programs_do_not_agree_on_another(
    groups: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    comm, team = QuietComm(), ("dp", (0, 1))
    found = []
    for totals in (team, team, None, team):
        comm.extend(RequiredCommunicators(teams=[team], totals=totals))
        found.append((comm.totals_key, comm.sums))

    assert found == [(team, 0), (team, 0), ("loss_norm", 1), ("loss_norm", 1)]


def test_only_links_have_options_where_no_stream_has_a_share(
    groups: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    QuietComm().extend(RequiredCommunicators(["pp"], [("dp", (0, 1))], [("pp", 0, 1)]))

    assert [limits for _, backend, limits in groups if backend == "nccl"] == [(False, FEW)]
    assert {limits for _, backend, limits in groups if backend != "nccl"} == {None}


def test_links_have_what_the_environment_says(
    groups: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")

    QuietComm().extend(RequiredCommunicators(["pp"], links=[("pp", 0, 1)]))

    assert {limits for _, _, limits in groups} == {None}


@pytest.mark.parametrize(("rank", "asked"), [(0, []), (1, [("pp", -1)])])
def test_where_sizes_come_first_both_ends_have_queues_of_their_own(
    groups: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, rank: int, asked: list[Any]
) -> None:
    threads: list[Any] = []
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(nccl, "CudaExchangeThread", lambda *given: threads.append(given))

    links = [("pp", 0, 1), ("pp", 1, 0)]
    QuietComm().extend(RequiredCommunicators(["pp"], links=links, dynamic_links=links[:1]))

    assert [limits for _, backend, limits in groups if backend == "nccl"] == [
        (True, FEW),
        (False, FEW),
    ]
    assert threads == asked  # only the receiver has one


def test_a_link_on_which_sizes_come_first_only_later_gets_another_communicator(
    groups: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    comm, links = QuietComm(), [("pp", 0, 1), ("pp", 1, 0)]

    comm.extend(RequiredCommunicators(["pp"], links=links))
    first = comm.groups["pp", 0, 1]
    comm.extend(RequiredCommunicators(["pp"], links=links, dynamic_links=links[:1]))
    comm.extend(RequiredCommunicators(["pp"], links=links, dynamic_links=links[:1]))

    asked = [limits for _, backend, limits in groups if backend == "nccl"]
    assert asked == [(False, FEW), (False, FEW), (True, FEW)]
    assert comm.groups["pp", 0, 1] is not first
    assert comm.groups["before", ("pp", 0, 1)] is first  # to be closed with the others


# Compute


class FakeStream:
    """Notes who waits for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on a GPU of 132 SMs that is not there."""
    seen: list[str] = []

    def create(num_sms: int, device_id: int) -> Any:
        seen.append(f"{num_sms} SMs of {device_id}")
        return SimpleNamespace(Stream=lambda: FakeStream("green", seen))

    def make(device: torch.device, priority: int) -> FakeStream:
        return FakeStream(f"priority {priority}", seen)

    @contextmanager
    def inside(stream: FakeStream) -> Any:
        seen.append(f"on {stream.name}")
        yield
        seen.append(f"off {stream.name}")

    from torch.cuda import green_contexts

    monkeypatch.setattr(green_contexts, "GreenContext", SimpleNamespace(create=create))
    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream("outside", seen))
    there = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    return seen


def steps(*shares: Share, count: int = 1) -> None:
    for _ in range(count):
        with stream_shares.on_compute_stream(Plan(0, (), (), streams=shares), GPU):
            pass


def test_compute_runs_on_its_part_of_the_gpu_between_what_is_before_and_after(
    log: list[str],
) -> None:
    step = ["green waits for outside", "on green", "off green", "outside waits for green"]

    steps(EP, Share("compute", 112), count=2)

    assert log == ["112 SMs of 0", *step, *step]


def test_compute_with_a_priority_has_a_stream_of_its_own(log: list[str]) -> None:
    steps(Share("compute", priority="high"))

    assert "on priority -1" in log


def test_compute_that_is_not_mentioned_runs_as_ever(log: list[str]) -> None:
    steps(EP, Share("compute"))

    assert log == []


def test_more_sms_than_there_are_are_refused(log: list[str]) -> None:
    with pytest.raises(StrategyError) as refused:
        steps(Share("compute", 133))

    assert str(refused.value) == (
        "stream: compute asks for 133 SMs, but the GPU has 132\n  fix: write sms=132 or less"
    )


def test_a_gpu_that_processes_share_is_not_divided_again(
    log: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PIPER_SHARE_GPU", "1")

    steps(Share("compute", 112), count=2)

    assert log == []
    assert caplog.messages == [
        "processes share this GPU, so compute gets all SMs of its process: sms is ignored"
    ]


def test_a_torch_without_green_contexts_is_refused(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(**_: int) -> None:
        raise RuntimeError("not built with it")

    from torch.cuda import green_contexts

    monkeypatch.setattr(green_contexts, "GreenContext", SimpleNamespace(create=unsupported))

    with pytest.raises(StrategyError) as refused:
        steps(Share("compute", 112))

    assert str(refused.value) == (
        f"stream: torch {torch.__version__} cannot limit compute to some of the SMs: "
        "not built with it\n"
        '  fix: use torch 2.11 or later and CUDA 12.8 or later, or leave out Stream("compute")'
    )


# The CPU


def trained(*streams: Stream) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (torch.randn(4, 4), torch.randn(4, 4))
    trainer = Trainer(
        model, nn.functional.mse_loss, [Place(where(), [0]), *streams],
        example=batch, optimizer=partial(torch.optim.AdamW, lr=0.1), device="cpu",
    )  # fmt: skip
    losses = [trainer.step(*batch).loss for _ in range(3)]
    found = trainer.state_dict()
    trainer.close()
    assert found is not None
    return losses, found


def test_a_cpu_trains_as_without_shares_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, wanted = trained()
    assert NOTE not in caplog.messages

    losses, found = trained(Stream("compute", sms=8))
    trained(Stream("compute", priority="high"))

    assert losses == plain
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert caplog.messages.count(NOTE) == 1
