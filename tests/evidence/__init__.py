"""Which arcs of megatron/ each test reaches, on its ranks and in processes that it starts: why a test is quick or not.

``pytest --evidence FOLDER`` records, and ``python -m tests.evidence FOLDER`` compares the tiers.
"""
