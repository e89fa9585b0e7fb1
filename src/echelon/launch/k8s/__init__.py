"""launch=k8s: a Job or a JobSet whose pods are the nodes, and kubectl to submit it."""
