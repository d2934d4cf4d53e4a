"""The experiments of Wenk et al. (2019), with its rivals in the same model.

``python -m benchmarks.paper`` runs the study, ``python -m benchmarks.paper
table`` and ``figures`` show what has been saved; see ``--help``.
"""
