"""Divides the work of one region over several devices: tensor, sequence and context parallelism."""
