"""Programs of the Symphony paper's figures and tables."""
