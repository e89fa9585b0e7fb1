"""launch=slurm: a readable batch script that queues itself again until the run is done."""
