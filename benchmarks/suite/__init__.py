"""The benchmarks, one module each with one entry point, ``run``: see ``benchmarks.__main__``."""
