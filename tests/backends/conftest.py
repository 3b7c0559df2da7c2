"""A user's backend, registered for one test."""

import pytest

from jattn.backends import register_backend, unregister_backend
from tests.backends.toy import ToyBackend


@pytest.fixture
def toy():
    register_backend("toy", ToyBackend)
    yield "toy"
    unregister_backend("toy")
