"""What is kept of a pass for whoever looks, and what that costs.

`plan` says which points are kept and which are worked out later from those; `reductions` what may be kept in the place
of a value (`… | top(5)`); `recorder` is the tap that keeps the values as the pass shows them, `spill` a file for those
that do not fit into memory. `bill` says before the run what all of it takes; `counted` says the same of a
configuration without weights, for `cutaway count`.
"""
