"""Policies of papers as they are printed (`policy_kwargs: {exact: true}`), to compare with."""
