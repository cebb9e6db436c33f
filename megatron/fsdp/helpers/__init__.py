"""Helpers that have nothing to do with sharding."""
