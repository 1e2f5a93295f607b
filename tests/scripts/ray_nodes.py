"""Two Ray nodes of one CPU each, for tests, until stdin is closed; prints their address.

To be started by `unshare -Urn`, in a network of its own where only `lo` is: Ray asks a public host
for its own address otherwise.
"""

import fcntl
import os
import socket
import struct
import sys

UP, RUNNING, SET_FLAGS = 0x1, 0x40, 0x8914


def main() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, SET_FLAGS, struct.pack("16sH14x", b"lo", UP | RUNNING))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    one = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=one)
    cluster.add_node(num_cpus=1)
    print(f"address {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
