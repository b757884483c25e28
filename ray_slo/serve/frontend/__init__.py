"""Code of frontend replicas: a request from its arrival to its answer."""
