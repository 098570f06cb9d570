"""OpenAI's clients, bound to a pool of this process."""

from typing import TYPE_CHECKING

import httpx
import openai

from enginepool.http.endpoints import Endpoints
from enginepool.http.transport import BlockingPoolTransport, Loop, PoolTransport

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

#: It goes nowhere: the transport answers in this process.
_URL = "http://enginepool/v1"
_KEY = "none"


def async_client(endpoints: Endpoints) -> "AsyncOpenAI":
    """A client on the pool's loop. It asks each thing once: the pool itself tries again what may be."""
    http = httpx.AsyncClient(transport=PoolTransport(endpoints))
    return openai.AsyncOpenAI(api_key=_KEY, base_url=_URL, http_client=http, timeout=None, max_retries=0)


def blocking_client(endpoints: Endpoints, loop: Loop) -> "OpenAI":
    """A client for code that does not await."""
    http = httpx.Client(transport=BlockingPoolTransport(endpoints, loop))
    return openai.OpenAI(api_key=_KEY, base_url=_URL, http_client=http, timeout=None, max_retries=0)
