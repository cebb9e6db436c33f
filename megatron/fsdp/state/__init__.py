"""State dicts, exports, and whether ranks agree on weights."""
