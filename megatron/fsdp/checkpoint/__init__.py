"""Checkpoints on disk: read in part, written whole or not at all, checked, and never executed."""
