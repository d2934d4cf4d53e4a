"""The solution as a node: ``python -m benchmarks.node``; see ``__main__``."""
