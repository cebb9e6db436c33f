"""The benchmarks: one module each, with the entry point ``run``. See ``benchmarks.__main__``."""
