"""One process per rank, started by hand in any order:

python distributed.py rank=0 world_size=4
…
python distributed.py rank=3 world_size=4
"""

from toy import experiment

import echelon

if __name__ == "__main__":
    echelon.main(experiment)
