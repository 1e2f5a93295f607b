"""Start the processes of a run: local ones, or those that torchrun started."""
