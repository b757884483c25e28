"""Benchmark programs behind one front door: `python -m benchmarks`."""
