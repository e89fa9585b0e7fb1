"""`echelon dev`: an allocation of Slurm to work in, with a shell, an ssh entry and forwarded ports.

The allocation is a batch job, so that a terminal that is lost loses nothing. Its script is the
keeper (`keeper.py`), which ends the job when nobody has used it for a while. A shell is a step of
the job, which any number of `echelon dev` open (`attach.py`). Which allocations there are is asked
of Slurm's queue, by the names of the jobs; nothing else has to be kept right.
"""
