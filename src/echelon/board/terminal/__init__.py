"""The board in a terminal: `echelon board --tui`.

`app` has the program, `runs_screen` the table and the curves, `run_screen` one run. They show what
the index of the board holds, read curves and logs as its server does, and mean by a filter what
`echelon runs` means.
"""
