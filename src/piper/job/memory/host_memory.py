"""Memory of the host."""

import os
from contextlib import suppress
from pathlib import Path


def free_memory() -> int:
    """Bytes of free memory on this machine."""
    with suppress(OSError):
        for row in Path("/proc/meminfo").read_text().splitlines():
            if row.startswith("MemAvailable:"):
                return int(row.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
