"""DTensors whose shards have any size, as parameters, optimizer state and state dicts hold them."""
