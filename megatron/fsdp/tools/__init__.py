"""Commands, and what looks at a model from outside: doctor, verify, trace, launch."""
