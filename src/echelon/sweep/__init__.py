"""Sweeps: a file in wandb's format, searched by Optuna here or by wandb's server; every trial is a
whole run, on any launcher."""
