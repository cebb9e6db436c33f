"""When: which modules are units, when a unit is gathered and reduced, and in which order."""
