"""How an optimizer of torch updates main weights."""
