"""`Pool.openai`: OpenAI's own client, bound to the pool."""

from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from enginepool.client.arguments import check_group
from enginepool.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from enginepool.http.endpoints import Endpoints


class OpenAICalls:
    """The calls of a pool that make clients of OpenAI's API."""

    #: those that were made, by their arguments
    _openai_endpoints: "dict[str, Endpoints]"

    def openai(self, group: str = "", *, model: str | PathLike[str] | None = None, **settings: Any) -> "AsyncOpenAI":
        """An `openai.AsyncOpenAI` that asks this pool, in this process: chat and completions with templates, tools,
        reasoning, logprobs, `n`, usage and streams.

            client = pool.openai()
            answer = await client.chat.completions.create(model="", messages=[{"role": "user", "content": "Hello"}])

        Its first request imports SGLang, which takes seconds, and waits for a worker. The client works on the loop of the pool.
        One process serves one model this way.

        Args:
            group: may be left out where the pool has one group. Its engines generate.
            model: where tokenizer, template and configuration are: a folder on this host, or a name of the model hub. Default:
                the model of the group.
            settings: SGLang's, by its names: chat_template, reasoning_parser, tool_call_parser, tokenizer_path,
                trust_remote_code and others that concern text. Parsers are found by the template of the model where they are
                not given.

        Raises:
            ConfigError: sglang or openai is not installed here, or a setting is none of these. All else is raised by the
                requests, as the errors of `openai`.
        """
        endpoints = self.endpoints(group, model, settings)
        from enginepool.http.clients import async_client

        return async_client(endpoints)

    def endpoints(self, group: str, model: str | PathLike[str] | None, settings: dict[str, Any]) -> "Endpoints":
        """What answers the requests of such clients; the same for equal arguments. Raises ConfigError."""
        from enginepool.http.build import check_settings, missing
        from enginepool.http.endpoints import Endpoints

        check_settings(model, settings)
        if lacking := missing():
            raise ConfigError(f"openai: {lacking}")
        path = None if model is None else fspath(model)
        key = repr((check_group(group), path, sorted(settings.items())))
        if key not in self._openai_endpoints:
            self._openai_endpoints[key] = Endpoints(self, group, path, settings)
        return self._openai_endpoints[key]
