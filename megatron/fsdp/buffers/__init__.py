"""Parameters, weights and gradients in flat buffers, and the memory of these buffers."""
