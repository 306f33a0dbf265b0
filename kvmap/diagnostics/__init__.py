"""Why a transfer works or does not: how well the mapper rebuilds keys and values."""
