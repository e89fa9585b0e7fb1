"""`echelon board`: one live page over runs, sweeps, jobs and machines.

A server of the standard library on loopback, an index of runs that is checked by stat, and a page
of plain modules. Nothing here imports torch; rich, Hydra and numpy are imported where they are
needed, because the page must be there at once.
"""
