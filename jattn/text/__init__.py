"""Text on both sides of a model: tokenizers, growing text, chat templates. All of it reads untrusted folders."""

from jattn.text.chat import ChatTemplate, chat_prompt, load_chat_template
from jattn.text.tokenizer import ByteTokenizer, Detokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "ChatTemplate",
    "Detokenizer",
    "Tokenizer",
    "chat_prompt",
    "load_chat_template",
    "load_tokenizer",
]
