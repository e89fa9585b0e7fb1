"""Sweeps: search for the best settings, with a file in wandb's format.

sweep_file, search_space, located_yaml   the file format and the search space
sampling, hyperband                      which values a trial gets, and when it stops early
optuna_study, optuna_journal             where Optuna keeps the results
sweep_folder, trial_store, trial_lease   the shared folder, its trials, who runs which
plan, run_sweep                          from the command line to a running sweep
worker, trial_process, trial_command     one worker: take a trial, run it, report it
metric_history                           the metric of a run while it grows
supervisor, slurm_workers                many workers: on this machine, or as a job array
report, display, plot, plot_image        what came of it
wandb/                                   sweeps on wandb's server
"""
