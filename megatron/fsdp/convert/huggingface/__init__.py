"""Conversion between Megatron checkpoints and Hugging Face models."""
