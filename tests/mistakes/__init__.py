"""Mistakes that users make, as docs/mistakes.md lists them, and the error that each must end in."""
