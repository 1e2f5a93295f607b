"""Run every benchmark of this folder, one after the other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNS = (
    ["compile_time.py"],
    ["host_time.py"],
    ["capture_memory.py"],
    ["one_device.py", "--compiled"],
)


def links(name: str) -> list[str]:
    """Options for machines without the tools that slowed links need."""
    slow = all(map(shutil.which, ("unshare", "ip", "tc")))
    return [] if slow or name == "zero_memory.py" else ["--links", "normal"]


def main() -> None:
    for name, *arguments in RUNS:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, str(HERE / name), *arguments], check=True)
    for name in ("data_parallel.py", "pipeline_zero.py", "experts.py", "zero_memory.py"):
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, str(HERE / name), *links(name)], check=True)
    for ranks in ("2", "4"):
        print(f"== pipelining.py on {ranks} ranks", flush=True)
        command = [sys.executable, "-m", "piper", "run", str(HERE / "pipelining.py"), "-n", ranks]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
