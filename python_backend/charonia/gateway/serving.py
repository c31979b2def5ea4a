"""What every request for text needs of the gateway.

Owns the names of the model, and the limits that hold for every API. Must not know any API.
"""

import time
from collections.abc import Sequence

from charonia.gateway.errors import invalid, no_such_model
from charonia.gateway.generation import Generation
from charonia.gateway.prompts import Prompt, Prompts
from charonia.gateway.settings import GatewaySettings
from charonia.gateway.upstream import Upstream
from charonia_client import Sampling, Timeouts


class Serving:
    """Serves requests for text with one model.

    Attributes:
        created: of the model, as listed: when the gateway was started.
    """

    def __init__(self, settings: GatewaySettings, prompts: Prompts, upstream: Upstream) -> None:
        self.settings = settings
        self.prompts = prompts
        self.upstream = upstream
        self.created = int(time.time())

    def check_model(self, name: str | None) -> str:
        """Return the model's name in the answer.

        Raises:
            ApiError: the request names another model.
        """
        names = self.settings.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise no_such_model(name)
        return name

    def check_size(self, name: str, count: int) -> None:
        """Check how many prompts the field `name` has. Raises ApiError."""
        most = self.settings.max_prompts
        if count > most:
            raise invalid(f"{name} must have at most {most} {name}s, but has {count}", name)

    def generation(
        self, request_id: str, prompts: Sequence[Prompt], sampling: Sampling, *, hides: bool = False
    ) -> Generation:
        """Make a generation with the gateway's time limit."""
        timeouts = Timeouts(total_s=self.settings.request_timeout_s)
        return Generation(request_id, prompts, sampling, timeouts, hides_output=hides)
