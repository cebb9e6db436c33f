"""Decides which modules are units, and when and in which order units are unsharded and reduced."""
