"""Programs of the Kairos paper's figures."""
