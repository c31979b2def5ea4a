"""The devices that device-neutral tests run on: all that this machine has."""

import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
