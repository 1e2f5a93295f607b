"""Compiled jobs that run: training, evaluation, rehearsals, measurements."""
