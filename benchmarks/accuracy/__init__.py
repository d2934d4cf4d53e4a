"""Trajectory errors, coverage and mixing beside the exact posterior, on simulated data."""
