"""A trace told to people: as plain data, and drawn in the terminal.

`report` is the plain data, what `cutaway trace --json` prints; `edges` finds who listens to whom most. Everything is
drawn on a `page`: the whole pass (`overview`), the tokens of a prompt (`chips`), one head (`heatmap`), one tensor in
full (`tensor`), what edits did (`edits`), how much each token of a text surprised (`score`).
"""
