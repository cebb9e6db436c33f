"""Where parameters, weights and gradients lie: flat buffers, their memory, and what is done with them."""
