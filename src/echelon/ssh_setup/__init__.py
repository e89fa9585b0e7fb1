"""`echelon setup ssh HOST`: makes a machine a host of launch=ssh.

``ssh_key`` makes a key, ``ssh_config`` writes the entry, ``command`` leads and checks the host.
Nothing that exists is changed.
"""
