"""Checks that only a GPU can make. ``python -m tests.gpu --out FOLDER`` runs them, the most valuable ones first.

Each check prints one line with its verdict and writes NAME.json and NAME.log. ``--device cpu --dry-run`` runs their own
code with small sizes on a CPU. That finds mistakes in the checks and says nothing about a GPU.
"""
