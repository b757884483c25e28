"""Programs of the SHEPHERD paper's figures and tables."""
