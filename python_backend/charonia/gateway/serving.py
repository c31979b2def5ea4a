"""Common part of all requests for text.

Owns the names of the model, the limits that hold for every API, and the use of the fallback
model. Must not know any API.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import TypeVar

from charonia.errors import CharoniaError
from charonia.gateway.errors import ApiError, invalid, no_such_model, wrong_tenant
from charonia.gateway.generation import Generation
from charonia.gateway.observing import Record
from charonia.gateway.prompts import Prompt, Prompts
from charonia.gateway.settings import GatewaySettings
from charonia.gateway.upstream import Upstream, may_do_better
from charonia_client import CharoniaClientError, Sampling, Timeouts

_OF_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids", "logit_bias")
T = TypeVar("T")


class Serving:
    """Serves requests for text with one model.

    Args:
        answers_as: makes this a fallback: requests name the model of `settings`, but answers name
            this one. fallback: answers while no server of this one can.

    Attributes:
        created: of the model, as listed: when the gateway was started.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        prompts: Prompts,
        upstream: Upstream,
        *,
        answers_as: str | None = None,
        fallback: "Serving | None" = None,
    ) -> None:
        self.settings = settings
        self.prompts = prompts
        self.upstream = upstream
        self.fallback = fallback
        self.created = int(time.time())
        self._answers_as = answers_as

    async def close(self) -> None:
        """Close all connections, and stop all threads."""
        self.prompts.close()
        await self.upstream.close()
        if self.fallback is not None:
            await self.fallback.close()

    def check_model(self, name: str | None) -> str:
        """Return the model's name in the answer.

        Raises:
            ApiError: the request names another model.
        """
        names = self.settings.model_names
        if name is not None and name not in names:
            raise no_such_model(name)
        return self._answers_as or name or names[0]

    def check_size(self, name: str, count: int) -> None:
        """Check how many prompts the field `name` has. Raises ApiError."""
        most = self.settings.max_prompts
        if count > most:
            raise invalid(f"{name} must have at most {most} entries, but has {count}", name)

    def generation(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        tenant: str | None,
        *,
        hides: bool = False,
    ) -> Generation:
        """Make a generation with the gateway's time limit.

        Args:
            tenant: that of the request's API key; None leaves the choice to the request.

        Raises:
            ApiError: the request names another tenant, or it has token ids, which mean other texts
                to a fallback model.
        """
        if tenant is not None:
            named = sampling.get("tenant") or tenant
            if named != tenant:
                raise wrong_tenant(named, tenant)
            sampling = sampling | Sampling(tenant=tenant)
        if self._answers_as is not None and _has_token_ids(prompts, sampling):
            raise invalid("token ids are not sent to the fallback model")
        timeouts = Timeouts(total_s=self.settings.request_timeout_s)
        return Generation(request_id, prompts, sampling, timeouts, hides_output=hides)

    async def answered(
        self,
        record: Record,
        run: Callable[["Serving"], Awaitable[T]],
        has_begun: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run a request, and run it again with the fallback model if no server can take it.

        The first error stands if the fallback model cannot answer either.

        Args:
            has_begun: whether a part of the answer was sent, which a second run would repeat.
        """

        def is_final() -> bool:
            # What came of a stream has been counted, even if none of it was sent yet.
            return has_begun() or record.first_token_s is not None

        try:
            return await run(self)
        except (ApiError, CharoniaClientError) as error:
            if self.fallback is None or is_final() or not _has_no_server(error):
                raise
            first = error
        record.note_fallback(self.fallback.check_model(None))
        try:
            return await run(self.fallback)
        except (ApiError, CharoniaClientError, CharoniaError):
            if is_final():
                raise
            raise first from None


def _has_no_server(error: ApiError | CharoniaClientError) -> bool:
    if isinstance(error, ApiError):
        return error.status == HTTPStatus.SERVICE_UNAVAILABLE
    return may_do_better(error)


def _has_token_ids(prompts: Sequence[Prompt], sampling: Sampling) -> bool:
    return any(prompt.text is None for prompt in prompts) or any(
        sampling.get(name) for name in _OF_TOKEN_IDS
    )
