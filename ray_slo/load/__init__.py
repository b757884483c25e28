"""Client tooling: recorded workloads, the open-loop driver and its report."""
