"""The live page's server: runs on request, tensors when a view needs them. `make_app` is the whole of it."""

from cutaway.serve.app import make_app

__all__ = ["make_app"]
