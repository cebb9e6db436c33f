"""Programs that once did not give the same answer, reduced. A test runs them all."""
