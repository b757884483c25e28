"""Code that policies share: workers and lanes, timers, refusals."""
