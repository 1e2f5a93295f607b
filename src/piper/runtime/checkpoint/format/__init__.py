"""The files of a checkpoint: safe to read, whoever wrote them."""
