"""An HTTP server with the OpenAI interface for one Engine or Embedder; needs `pip install 'jattn[serve]'`."""

from jattn.serve.app import make_app
from jattn.serve.embeddings import make_embeddings_app
from jattn.serve.options import ServerOptions
from jattn.serve.server import serve

__all__ = ["ServerOptions", "make_app", "make_embeddings_app", "serve"]
