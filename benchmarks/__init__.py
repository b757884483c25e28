"""Benchmark programs behind one front door: `python -m benchmarks`."""

import os

# Before NumPy is imported. Times are those of one core, and threads of BLAS that wait for a core
# on a busy machine spin: small factorisations then cost three times as much.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
