"""Problems from a generator, truth drawn from the priors: ``python -m benchmarks.zoo``."""
