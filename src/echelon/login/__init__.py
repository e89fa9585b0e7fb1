"""Slurm from a machine without Slurm: a login node does what only it can do, over the system's ssh.

`connection` opens one ssh session and starts `host.serve` there, with Echelon's own code sent by
content. `submission` sends the source and submits jobs; `local_copy` and `refresh` bring back what
runs write, into an ordinary run folder here; `remote_commands` has the verbs that are carried out
there, and `pull` brings snapshots. Modules of `host` run on the login node: they import the
standard library and those parts of Echelon that need no other package.
"""
