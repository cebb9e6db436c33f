"""Values for models that are built on the meta device."""
