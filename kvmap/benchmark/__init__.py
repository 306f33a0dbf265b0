"""Time and bytes of a hand-off against reading again."""
