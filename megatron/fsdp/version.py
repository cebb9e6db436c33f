"""The version of this package, which pyproject.toml reads from here, and the versions that it was tested with."""

__version__ = "0.1.0"

# All unit tests pass with these, oldest first. `make torch-versions` runs them.
TRIED_TORCH = ("2.11", "2.13", "2.15")

# Trains, saves and resumes with these; docs/versions.md says what was run. `make mcore-versions` runs most of them.
TRIED_MEGATRON = ("0.18.2", "0.19.0", "0.19.1", "0.19.2")
