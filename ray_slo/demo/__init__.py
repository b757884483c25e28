"""`python -m ray_slo.demo`: real digit images, served several ways, on this machine.

Every system answers the same recorded requests, with the same network, decoding, replicas,
threads, warm-up and client; only who forms the batches differs. Rate and SLO are calibrated to
the machine: near the capacity of plain Serve with a hand-tuned wait.
"""
