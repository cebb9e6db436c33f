"""Reads, converts and writes checkpoints without a model, a GPU or a process group."""
