"""The OpenAI-compatible routes: completions and chats for clients that know that interface, in shared passes."""

from cutaway.serve.openai.routes import OpenAI

__all__ = ["OpenAI"]
