"""A pipeline whose stages have different numbers of devices, for mixed hardware.

    piper run examples/literature/asymmetric_stages.py -n 4

One fast GPU (device 0) has the first three layers. Three slower ones have the other five; of these,
device 1 takes half of the rows. Both stages have four replicas: device 0 runs the first stage for
one after the other. Stages and orders are those of 1F1B.
"""

from train import train

from piper import Order, Place, Replicate, Split, Stage, Strategy, strategies, where

SCHEDULE = strategies.one_f_one_b(pp=2, microbatches=2, stages=[3, 5])
STRATEGY = Strategy([
    *(directive for directive in SCHEDULE if isinstance(directive, Stage)),
    Place(where(PP=0), devices=[0]),
    Place(where(PP=1), devices=[1, 1, 2, 3]),
    Replicate(where(PP=1), devices=[1, 2, 3], zero=2),
    *(directive for directive in SCHEDULE if isinstance(directive, Split | Order)),
])  # fmt: skip

if __name__ == "__main__":
    train(STRATEGY)
