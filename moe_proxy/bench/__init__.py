"""Owns measuring on the user's own machine and model: arms, samples, results, their picture."""
