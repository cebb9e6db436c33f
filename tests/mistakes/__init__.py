"""Mistakes that users make, as README.md lists them, and the error that each must end in."""
