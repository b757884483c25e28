"""Planners as pure state machines: what they hear, when they plan, what they tell."""
