"""Time to first token and tokens per second of hand-offs between two engines, against reading again."""
