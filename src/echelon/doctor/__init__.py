"""`echelon doctor`: whether this machine can train, and what to do where it cannot.

Facts are read first (``machine_facts``, ``torch_facts``, ``smoke_test``), then evaluated by pure
functions (``rules``), then printed (``report``). ``echelon preflight`` uses the same verdicts.
A new check is a field of ``MachineFacts`` and a function in ``rules.RULES``.
"""
