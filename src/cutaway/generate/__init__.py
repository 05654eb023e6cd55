"""Picking tokens from logits, and the loop that makes a response of them."""

from cutaway.forward.cache import KVCache
from cutaway.generate.batch import Batch, QueueFull
from cutaway.generate.cache_use import CacheStep, CacheUse
from cutaway.generate.loop import Generation, all_finished, finished, loop
from cutaway.generate.passes import Passes
from cutaway.generate.record import Recording, StageRecord, StepRecord, distribution
from cutaway.generate.response import Finish, Limits, Request, Response, ScoredToken, Step
from cutaway.generate.sampling import ORDERS, Sampling, sample
from cutaway.generate.settings import Basic, Settings, make_request, seeds_of
from cutaway.generate.stages import History
from cutaway.generate.ticket import Ticket

__all__ = [
    "ORDERS",
    "Basic",
    "Batch",
    "CacheStep",
    "CacheUse",
    "Finish",
    "Generation",
    "History",
    "KVCache",
    "Limits",
    "Passes",
    "QueueFull",
    "Recording",
    "Request",
    "Response",
    "Sampling",
    "ScoredToken",
    "Settings",
    "StageRecord",
    "Step",
    "StepRecord",
    "Ticket",
    "all_finished",
    "distribution",
    "finished",
    "loop",
    "make_request",
    "sample",
    "seeds_of",
]
