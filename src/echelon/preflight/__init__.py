"""`echelon preflight`: checks the nodes that a job will use, before the job does.

``check_nodes`` leads: the launcher plans how to start ``node_probe`` on every node (as a process,
over ssh or by srun), ``probe_client`` sends it orders and collects the answers, ``rules`` turns the
answers into verdicts of ``echelon.doctor``, ``report`` prints them. A new check is a value in the
answer of ``node_probe`` and a function in ``rules.NODE_RULES``.
"""
