"""Runs of other programs: what TensorBoard and wandb have written becomes run folders in the cache,
which everything else of the board reads as its own."""
