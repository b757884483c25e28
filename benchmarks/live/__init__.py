"""Programs that start Ray and load applications on Ray Serve."""
