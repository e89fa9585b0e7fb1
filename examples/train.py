"""One GPU, or the CPU without one, configured by conf/config.yaml: python train.py"""

from toy import experiment

import echelon

if __name__ == "__main__":
    echelon.main(experiment)
