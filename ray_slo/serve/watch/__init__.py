"""How operators see what happens: metrics, traces, status, dashboards."""
