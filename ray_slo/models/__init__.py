"""Work on users' networks: loading them, running them, measuring their latency profiles, and
stopping a running batch."""
