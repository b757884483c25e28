"""Client tools: recorded workloads, the open-loop load generator and its report."""
