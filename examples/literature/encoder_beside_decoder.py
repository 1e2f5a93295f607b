"""An encoder trained beside a decoder, on different numbers of devices.

    piper run examples/literature/encoder_beside_decoder.py -n 3

The encoder reads long sources and has two devices. The decoder reads short targets and has one.
Its own blocks do not need the encoder, so both branches run at the same time. Where they meet, the
decoder's device gets the rows of both encoders, one replica after the other.
"""

from train import train
from two_branches import BATCH, TwoBranches, loss_fn

from piper import Place, Replicate, Split, Strategy, where

STRATEGY = Strategy([
    Place(where(ENC=0), devices=[0, 1]),
    Place(where(DEC="*"), devices=[2]),
    Replicate(where(ENC=0), devices=[0, 1], zero=1),
    Split("MB", 2),
])  # fmt: skip

if __name__ == "__main__":
    train(STRATEGY, TwoBranches(), loss_fn, BATCH)
