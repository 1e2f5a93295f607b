"""Communication between devices: gloo, NCCL, or threads of one process."""
