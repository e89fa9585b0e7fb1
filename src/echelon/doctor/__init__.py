"""Looking before leaping: `doctor` for this machine, `preflight` for the nodes of a job."""
