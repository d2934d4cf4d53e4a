"""ODEs of the literature that nobody here had tuned for, by the road of the README."""
