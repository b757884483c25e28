"""Programs of the RAMSIS paper's figures and tables."""
