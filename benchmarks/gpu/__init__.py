"""What is to be measured on a GPU, in one program: `python -m benchmarks gpu`, or `make gpu`."""
