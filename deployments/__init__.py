"""Ready-to-serve applications (import paths for ``serve run`` configs)."""
