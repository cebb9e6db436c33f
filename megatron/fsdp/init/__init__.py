"""Initialization of models that are built on the meta device."""
