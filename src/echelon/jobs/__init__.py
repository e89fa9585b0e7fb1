"""Runs on their machines, whatever launched them: their logs, following them, cancelling them."""
