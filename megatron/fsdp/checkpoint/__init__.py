"""Checkpoints on disk: partial reads, atomic saves, checksums, and unpickling that never runs code."""
