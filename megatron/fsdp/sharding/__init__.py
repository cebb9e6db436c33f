"""What a rank holds of a model: strategy, mesh, dtypes, layout, ownership. Values, no communication."""
