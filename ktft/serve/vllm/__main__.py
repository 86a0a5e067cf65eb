"""The server's process: `python -m ktft.serve.vllm VLLM-ARGUMENTS` runs vLLM's own OpenAI server.

Its settings come from the environment (`ServeSettings.from_env`). vLLM's entry points load the plugin that reads them
in each process. The exit code is 0 even after vLLM's engine has died, as with vLLM's server; the parent process knows
whether it told the server to end.
"""

from __future__ import annotations

import runpy
import warnings

from ktft.serve.front.processes import follow
from ktft.serve.runtime.settings import ServeSettings

# vLLM 0.24 has its server in this module and 0.32 a deprecated alias of it: it is the only module that both have.
SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Run the server, with this process's arguments, until it is told to end."""
    settings = ServeSettings.from_env()
    if settings.parent is not None:
        follow(settings.parent)
    warnings.filterwarnings("ignore", message=".*api_server.*", category=DeprecationWarning)
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
