"""Picking tokens from logits, and the loop that makes a response of them."""

from cutaway.generate.loop import Generation, Limits, Step, finished, loop
from cutaway.generate.sampling import Sampling, Stage, distribution, sample

__all__ = ["Generation", "Limits", "Sampling", "Stage", "Step", "distribution", "finished", "loop", "sample"]
