"""Start the ranks of a benchmark on this machine, on loopback or behind slowed links.

    python bench/links.py -n 2 --rate 500mbit bench/data_parallel.py ...

Behind slowed links, every rank has its own network namespace. Its only way out is a virtual network
card with that rate. This needs `unshare`, `ip` and `tc` (Debian: iproute2), but no root. Nothing is
left when the ranks have ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from piper.launcher.local import run_local

NORMAL = "normal"
BURST, QUEUE, FRAME = "128kb", "32mb", 9000
PORT = 29_500


def launch(
    script: str, arguments: Sequence[str], ranks: int, rate: str = NORMAL, burst: str = BURST
) -> None:
    """Run a script in several processes; exit if they fail."""
    if rate == NORMAL:
        code = run_local(script, arguments, ranks)
    else:
        inside = [sys.executable, str(Path(__file__).resolve()), "--inside"]
        own = ["unshare", "-Urnmp", "--propagation", "private", "--fork", "--kill-child"]
        how = ["-n", str(ranks), "--rate", rate, "--burst", burst]
        command = [*own, *inside, *how, script, *arguments]
        code = subprocess.run(command).returncode
    if code:
        raise SystemExit(code)


def tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def connect(ranks: int, rate: str, burst: str) -> None:
    """One namespace per rank, all on one bridge. Outgoing traffic of a rank is slowed."""
    tool("mount", "-t", "tmpfs", "tmpfs", "/run")
    Path("/run/netns").mkdir()
    tool("ip", "link", "set", "lo", "up")
    tool("ip", "link", "add", "bridge0", "type", "bridge")
    tool("ip", "link", "set", "bridge0", "up")
    for rank in range(ranks):
        here = ("ip", "netns", "exec", f"rank{rank}")
        card = f"card{rank}"
        tool("ip", "netns", "add", f"rank{rank}")
        tool("ip", "link", "add", card, "type", "veth", "peer", "name", "eth0",
             "netns", f"rank{rank}")  # fmt: skip
        tool("ip", "link", "set", card, "mtu", str(FRAME), "master", "bridge0", "up")
        tool(*here, "ip", "link", "set", "lo", "up")
        tool(*here, "ip", "link", "set", "eth0", "mtu", str(FRAME), "up")
        tool(*here, "ip", "addr", "add", f"{address(rank)}/24", "dev", "eth0")
        tool(*here, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
             "rate", rate, "burst", burst, "limit", QUEUE)  # fmt: skip


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def start(rank: int, ranks: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0",
    }  # fmt: skip
    return subprocess.Popen(["ip", "netns", "exec", f"rank{rank}", *command], env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=2, dest="ranks")
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--burst", default=BURST, help="what an idle link sends at once")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    if not chosen.inside:
        launch(chosen.script, chosen.arguments, chosen.ranks, chosen.rate, chosen.burst)
        return
    connect(chosen.ranks, chosen.rate, chosen.burst)
    command = [sys.executable, chosen.script, *chosen.arguments]
    children = [start(rank, chosen.ranks, command) for rank in range(chosen.ranks)]
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children):
            break
        time.sleep(0.05)
    for child in children:
        child.kill()
        child.wait()
    raise SystemExit(max(map(abs, (child.returncode for child in children))))


if __name__ == "__main__":
    main()
