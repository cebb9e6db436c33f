"""Formats of quantized weights in plain torch: a readable reference that runs on every device, slow by design."""
