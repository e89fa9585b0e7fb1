"""One GPU, or the CPU where there is none, as conf/config.yaml says: python train.py"""

from toy import experiment

import echelon

if __name__ == "__main__":
    echelon.main(experiment)
