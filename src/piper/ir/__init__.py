"""The training DAG: one graph of all computation and communication of a step."""
