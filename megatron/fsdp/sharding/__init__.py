"""How a model is sharded: strategy, mesh, dtypes, layout and ownership. Only values, no communication."""
