"""Benchmark programs behind one front door: `python -m benchmarks`."""

import os

# This must be set before NumPy is imported. Programs measure the time of one core. On a busy
# machine, threads of BLAS spin while they wait for a core, and factorisations take three times as
# long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
