"""The version of this package, which pyproject.toml reads from here, and the versions of torch it was tested with."""

__version__ = "0.1.0"

# All unit tests pass with these, oldest first. `make torch-versions` runs them.
TRIED_TORCH = ("2.11", "2.13", "2.15")
