"""What is asked of whole texts, many of them, without keeping a trace of any.

`scoring` runs texts through a model, window by window, for the log-probability of each token; `score` is what comes of
it, with perplexity and the divergence from another model. `vectors` gives one vector for each text, as sentence
encoders do.
"""
