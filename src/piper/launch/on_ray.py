"""Start a run on Ray: an actor for each device, all in one placement group, none left behind.

Ray places the processes, starts them, and notices when they die. It is not there in a step: the
script finds the same environment as under torchrun, and the processes talk to each other.
"""

from __future__ import annotations

import os
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piper.errors import InputError, Problem
from piper.launch.ending import GRACE, Ended, orderly, verdict
from piper.launch.keeper import Keeper, News
from piper.launch.rank_assignment import seats

LOCAL = "local"  # Ray's word for a cluster of one's own
PASSED_ON = ("PIPER_", "NCCL_", "GLOO_", "TORCH", "OMP_", "HF_", "PYTHON")
NOTICE = 20.0  # seconds until Ray says that a node has died
REACH = 10.0  # seconds to wait for an answer of a cluster's head
HOW = {  # to get into a cluster: of one's own or not
    True: "see what else runs on this machine, and start it again",
    False: "ask `ray status` on the head; Ray and Python have to be the same there and here",
}


@dataclass(frozen=True, slots=True)
class Worker:
    """The actor that keeps the process of a device, and the address of its node."""

    actor: Any
    address: str


def run_on_ray(
    address: str,
    script: str,
    arguments: Sequence[str],
    processes: int,
    extra: Mapping[str, str] | None = None,
) -> int:
    """Run a script in so many actors; the exit code and message of the first that failed."""
    ray = load()
    given = {**passed_on(os.environ), **(extra or {})}
    with joined(ray, address, processes), orderly(), reserved(ray, processes) as actors:
        workers = start(ray, actors, [str(Path(script).absolute()), *arguments], given)
        return verdict(watch(ray, workers))


def load() -> Any:
    """Ray itself, which Piper does not need otherwise."""
    try:
        import ray
    except ModuleNotFoundError:
        fix = "write `pip install 'piper-train[ray]'`, or start it without --on"
        raise InputError("--on ray", Problem("Ray is not installed here", fix)) from None
    return ray


def address_of(on: str) -> str:
    """What Ray calls the cluster that a user names; without a name, one on this machine.

    >>> address_of("ray"), address_of("ray:10.0.0.1:6379"), address_of("ray://head:10001")
    ('local', '10.0.0.1:6379', 'ray://head:10001')
    """
    if on == "ray":
        return LOCAL
    if not on.startswith("ray:") or on.endswith((":", "/")):
        fix = "write `ray` (this machine), `ray:auto`, `ray:HOST:PORT` or `ray://HOST:PORT`"
        raise InputError("--on", Problem(f"{on!r} is no cluster that Piper can start on", fix))
    return on if on.startswith("ray://") else on.removeprefix("ray:")


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What the user set for the run, as far as it makes sense on other hosts too.

    >>> passed_on({"NCCL_DEBUG": "INFO", "HOME": "/root"})
    {'NCCL_DEBUG': 'INFO'}
    """
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}


@contextmanager
def joined(ray: Any, address: str, processes: int) -> Iterator[None]:
    """Inside, this process is a driver of the cluster, or of one that exists for this run only."""
    refuse_unreachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
    cores = {"num_cpus": max(processes, os.cpu_count() or 1), "include_dashboard": False}
    try:
        enter(ray, address, cores if address == LOCAL else {})
        yield
    finally:
        ray.shutdown()


def enter(ray: Any, address: str, own: Mapping[str, Any]) -> None:
    """A cluster of one's own has half a minute to start: where much else runs, it gets another."""
    for more in reversed(range(2 if own else 1)):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
            return
        except Exception as error:  # a node that does not start in time is one of no kind
            ray.shutdown()
            if not more:
                raise InputError("--on", Problem(f"{address}: {error}", HOW[bool(own)])) from error


def refuse_unreachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH).close()
    except OSError as error:
        fix = "write the address that `ray start --head` printed, and see that it still runs"
        problem = Problem(f"nothing answers at {host}:{port} ({error})", fix)
        raise InputError("--on", problem) from error


@contextmanager
def reserved(ray: Any, processes: int) -> Iterator[list[Any]]:
    """An actor for each process, on a GPU of its own where there are any; gone afterwards."""
    wanted = os.environ.get("PIPER_DEVICE") or "cuda"
    kind = "GPU" if wanted == "cuda" and ray.cluster_resources().get("GPU") else "CPU"
    refuse_too_few(int(ray.cluster_resources().get(kind, 0)), kind, processes)
    group = ray.util.placement_group([{kind: 1}] * processes, strategy="PACK")
    actors: list[Any] = []
    try:
        wait_for(group, f"{processes} {kind}s")
        actors += [actor_in(ray, group, kind, index) for index in range(processes)]
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def refuse_too_few(count: int, kind: str, processes: int) -> None:
    if count < processes:
        fix = "add nodes, or start fewer"
        fix += "" if kind == "CPU" else "; PIPER_DEVICE=cpu in the environment asks for CPUs"
        raise InputError(
            "--on", Problem(f"the cluster has {count} {kind}s, and {processes} are wanted", fix)
        )


def wait_for(group: Any, wanted: str) -> None:
    """As long as others use what is wanted."""
    if not group.wait(2):
        print(f"piper: waiting for {wanted} of the cluster (Ctrl-C ends it)", file=sys.stderr)
        while not group.wait(5):
            pass


def actor_in(ray: Any, group: Any, kind: str, index: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    needs = {"num_cpus": int(kind == "CPU"), "num_gpus": int(kind == "GPU")}
    return ray.remote(Keeper).options(scheduling_strategy=place, **needs).remote()


def start(
    ray: Any, actors: Sequence[Any], script: Sequence[str], given: Mapping[str, str]
) -> list[Worker]:
    """Give everyone a rank, and let them start; by rank."""
    here = ray.get_runtime_context().get_node_id()
    try:
        places = ray.get([actor.place.remote() for actor in actors])
        found = seats(places, here)
        meeting = ray.get(actors[found[0].index].meeting_point.remote())
        own = [{**given, **seat.environment(len(actors), *meeting)} for seat in found]
        workers = [Worker(actors[seat.index], places[seat.index].address) for seat in found]
        ray.get(
            [
                worker.actor.start.remote(script, os.getcwd(), environment)
                for worker, environment in zip(workers, own, strict=True)
            ]
        )
    except ray.exceptions.RayError as error:
        fix = "see that the nodes are up, and that all have this Piper and this torch"
        raise InputError("--on", Problem(f"actors do not start: {why(error)}", fix)) from error
    return workers


def watch(ray: Any, workers: Sequence[Worker]) -> list[Ended]:
    """Show what they print until all have ended; after a failure the others have some seconds."""
    asked = {worker.actor.news.remote(): rank for rank, worker in enumerate(workers)}
    ended: list[Ended] = []
    until = float("inf")
    while asked and time.monotonic() < until:
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=1.0)
        for reference in ready:
            rank = asked.pop(reference)
            failed = any(process.code for process in ended)
            news = heard(ray, reference, workers[rank].address, failed)
            show(rank, news)
            if news.code is None:
                asked[workers[rank].actor.news.remote()] = rank
                continue
            ended.append(Ended(rank, news.code, time.monotonic(), news.reason))
            until = min(until, time.monotonic() + time_after(ended[-1]))
    return ended


def time_after(process: Ended) -> float:
    """Seconds that the others have. Of a symptom the cause is still to come: a node that died."""
    if not process.code:
        return float("inf")
    return GRACE if process.is_cause else NOTICE


def heard(ray: Any, reference: Any, address: str, failed: bool) -> News:
    """An answer, or that there will be none: the actor or its node is dead.

    An actor that cannot be reached may come back, and Ray says after some seconds if it is dead;
    where others have `failed` already, this is why.
    """
    try:
        news: News = ray.get(reference)
    except ray.exceptions.ActorUnavailableError:
        if failed:
            return lost(f"its Ray actor cannot be reached: {address} is down, or the way to it")
        time.sleep(0.2)
        return News()
    except ray.exceptions.RayError as error:
        return lost(f"its Ray actor on {address} died: {why(error)}")
    return news


def lost(reason: str) -> News:
    lines = textwrap.fill(reason, 100, initial_indent="  ", subsequent_indent="  ")
    return News(code=1, reason=lines)


def why(error: Exception) -> str:
    """What Ray says of a death, without its numbers.

    >>> why(Exception("It died.\\n\\tactor_id: 8\\n\\tip: 10.0.0.7\\nIts node has died.\\n"))
    'Its node has died.'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def show(rank: int, news: News) -> None:
    """The first device speaks for itself, the others with their names."""
    sign = f"[device {rank}] " if rank else ""
    for is_error, line in news.lines:
        print(sign + line, file=sys.stderr if is_error else sys.stdout)
    sys.stdout.flush()
    sys.stderr.flush()
