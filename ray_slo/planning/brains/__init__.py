"""Brains of planners: pure state machines that take reports, decide when to plan, and give
orders."""
