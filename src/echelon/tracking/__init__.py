"""Trackers: where the numbers of a run go. Only rank 0 has them."""
