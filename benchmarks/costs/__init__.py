"""Programs that measure what parts of ray-slo cost."""
