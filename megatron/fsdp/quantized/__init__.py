"""Formats of quantized compute weights. The rest of the engine knows only their interface, in ``storage``."""
