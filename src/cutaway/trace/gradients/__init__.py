"""How fast a number grows with each value of a pass: gradients at every point, on engines that keep them.

`connecting` is `model.trace(…, gradients=True)`: it runs a pass so that its values remember how they were made, with
edits too (`edited_graph`). `graph` holds those values as tensors, and the way back through them; what a trace offers of
it is `trace/connected.py`. `attributing` estimates from one way back what patching every value would do.
"""

from cutaway.trace.gradients.attributing import attribution

__all__ = ["attribution"]
