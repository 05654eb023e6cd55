"""Text to ids and back: tokenizers, special tokens, chat templates."""
