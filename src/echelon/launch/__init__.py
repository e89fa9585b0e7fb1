"""Launchers: where a run happens.

`launcher.py` says what a launcher is and how to add one, `registry.py` lists them, `plan.py` is
what all of them plan. `inline`, `local` and `env` are a file each; `ssh` and `slurm` are packages.
`node/` is what runs on every node, whichever launcher started it.
"""
