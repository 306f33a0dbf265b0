"""Many runs as one table, and what a setting changes in them: what the studies of `experiments/` share."""
