"""The engine for GPUs and for gradients: the same stages on tensors. Needs torch (`pip install "cutaway[torch]"`)."""
