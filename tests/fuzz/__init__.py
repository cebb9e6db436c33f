"""A fuzzer: random programs that are valid in plain torch run plain and sharded, and have to give the same answer."""
