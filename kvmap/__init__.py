"""kvmap: cross-model KV cache transfer.

pair -> capture -> moments -> mapper -> transferred cache -> diagnose, evaluate, benchmark -> report.
"""

__version__ = "0.1.0"
