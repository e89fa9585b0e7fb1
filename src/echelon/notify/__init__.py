"""News of runs, for a phone: what has happened, in a few lines, over webhook, mail, desktop or
Slack. A process beside the one that leads a run looks at the run's folder and sends."""
