"""The memory that the threads of the pool share, in 64-bit words, eight (a cache line) apart.

The word NEXT holds the phase's serial number · 2^32 + its parts · 2^16 + parts already claimed.
"""

NEXT, DONE, TASKS, YIELD, SERIAL, LATE, WORDS = 0, 8, 16, 17, 18, 19, 32
