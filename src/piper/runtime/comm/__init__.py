"""How a device reaches the others: gloo, NCCL, or threads of one process."""
