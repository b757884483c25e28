"""All measurements for a GPU, in one program: `python -m benchmarks gpu`, or `make gpu`."""
