"""Loading of state dicts, exports, and checks that ranks have the same weights."""
