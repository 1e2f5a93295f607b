"""What a run really did: recorder, profiler, clocks, memory, timings."""
