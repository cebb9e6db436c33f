"""Measurements in rank processes other than wall time: memory, copies, collectives and CPU time."""
