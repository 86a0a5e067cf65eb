"""The server's process: `python -m ktft.serve.vllm.engine VLLM-ARGUMENTS` is vLLM's own OpenAI server.

Settings come by `ktft.serve.runtime.settings.ServeSettings.to_env`, and the plugin that reads them by vLLM's own entry
points. It ends with 0 even when its engine has died, as vLLM's server does: who started it knows whether it was told
to end.
"""

from __future__ import annotations

import runpy
import warnings

from ktft.serve.front.processes import follow
from ktft.serve.runtime.settings import ServeSettings

# In vLLM 0.24 the server's home, in 0.32 a deprecated way to it: the only one that both have.
SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Run the server, with this process's arguments, until it is told to end.

    Raises:
        ValueError: there are no settings, or wrong ones.
    """
    settings = ServeSettings.from_env()
    if settings.parent is not None:
        follow(settings.parent)
    warnings.filterwarnings("ignore", message=".*api_server.*", category=DeprecationWarning)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
