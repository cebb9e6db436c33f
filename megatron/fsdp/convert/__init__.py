"""Inspects and converts checkpoints without a model, a GPU or a process group."""
