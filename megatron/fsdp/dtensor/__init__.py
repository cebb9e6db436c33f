"""DTensors with shards of any size: the type of sharded parameters, gradients and optimizer state."""
