"""Observe a run: recorder, profiler, clocks, timings."""
