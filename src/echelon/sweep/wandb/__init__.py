"""Sweeps whose search is on wandb's server."""
