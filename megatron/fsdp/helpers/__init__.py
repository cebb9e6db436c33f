"""What several packages need and that has nothing to do with sharding."""
