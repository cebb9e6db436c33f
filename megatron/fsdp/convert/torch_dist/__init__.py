"""Reads and writes ``torch_dist`` checkpoints of every kind, without a model."""
