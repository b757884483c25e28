"""`python -m ray_slo.demo`: a comparison of ways to serve images of digits, on this machine.

Every system answers the same recorded requests, with the same network, decoding, replicas,
threads, warm-up and client. Only the batching differs. The rate and the SLO are calibrated to the
machine: the rate is near the capacity of plain Serve with a tuned wait.
"""
