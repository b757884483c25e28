"""`python -m ray_slo.cli`."""

from ray_slo.cli import main

if __name__ == "__main__":
    main()
