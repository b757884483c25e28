"""Builds the application: in the driver, and in `serve build`."""
