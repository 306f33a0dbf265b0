"""Figures of a run, drawn from the plain rows of its tables."""
