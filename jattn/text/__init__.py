"""Text before and after a model: chat templates, tokenizers, text that grows token by token. Folders are untrusted."""

from jattn.text.chat import ChatTemplate, chat_prompt, load_chat_template
from jattn.text.detokenizer import Detokenizer
from jattn.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "ChatTemplate",
    "Detokenizer",
    "Tokenizer",
    "chat_prompt",
    "load_chat_template",
    "load_tokenizer",
]
