"""All of Toka as a child process, for this process alone: it listens at files in a private folder."""

from __future__ import annotations

import dataclasses

from toka.child import Child, Part, PartFailed
from toka.config import Config, arguments
from toka.display import Display
from toka.listen import UNIX

MODULE = "toka"
MEET_SECONDS = 60.0
"""What the launcher may take to say that it is ready, beyond what each part may take."""
END_SECONDS = 20.0
"""What it may take to end, once nobody asks it anything any more."""


class PrivateServer:
    """Toka with the settings of `config`, whatever they say of host and port. It ends with the thread that starts it.

    `module` is the launcher (measurements have one without a model).
    """

    def __init__(self, config: Config, display: Display, module: str = MODULE) -> None:
        self._seconds = config.start_timeout + MEET_SECONDS
        config = dataclasses.replace(config, host=UNIX)
        self._display = display
        self._child = Child(Part("toka", module, arguments(config)), display)

    async def ready(self) -> list[str]:
        """Wait until it serves: where each frontend listens, `unix:PATH`. RuntimeError, in a sentence, if it fails."""
        try:
            return (await self._child.ready(self._seconds)).split("\n")
        except PartFailed as failure:
            raise RuntimeError(str(failure)) from None
        finally:
            self._display.close()

    async def ended(self) -> str:
        """Wait until it has ended; why, in one sentence."""
        await self._child.ended()
        return self._child.epitaph()

    async def stop(self) -> None:
        """End it; what it still computes is lost."""
        await self._child.end(END_SECONDS)
