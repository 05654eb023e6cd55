"""The memory that the threads of the pool share, in 64-bit words, eight (a cache line) apart.

The word NEXT holds the phase's serial number · 2^32 + its parts · 2^16 + parts already claimed. ALONE_UNTIL is the
tick from which helpers are asked again after one was late, PENALTY how many ticks they were not, and LEFT how many
were left of these when a run ended. THREADS is how many threads there are, whoever calls included.
"""

NEXT, DONE, TASKS, YIELD, SERIAL, ALONE_UNTIL, PENALTY, LEFT = 0, 8, 16, 17, 18, 19, 20, 21
THREADS, WORDS = 22, 32
