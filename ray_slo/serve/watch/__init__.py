"""Tools for operators: metrics, traces, status, dashboards."""
