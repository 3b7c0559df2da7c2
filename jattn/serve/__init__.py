"""An HTTP server with the OpenAI interface, over one Engine; needs `pip install 'jattn[serve]'`."""

from jattn.serve.app import ServerOptions, make_app
from jattn.serve.run import serve

__all__ = ["ServerOptions", "make_app", "serve"]
