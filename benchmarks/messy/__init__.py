"""Data as they come: hidden states, missing values, counts, limits; beside the exact posterior."""
