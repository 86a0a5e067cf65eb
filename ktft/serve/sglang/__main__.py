"""The server's process: `python -m ktft.serve.sglang SGLANG-ARGUMENTS` runs SGLang's own OpenAI server.

Its settings come from the environment (`ServeSettings.from_env`). SGLang loads the plugin that reads them in each of
its processes, by its entry point.
"""

from __future__ import annotations

import os
import sys

from ktft.serve.front.processes import follow
from ktft.serve.runtime.settings import ServeSettings


def main() -> None:
    """Run the server, with this process's arguments, until it is told to end."""
    settings = ServeSettings.from_env()
    if settings.parent is not None:
        follow(settings.parent)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from ktft.serve.sglang import hooks
    from ktft.serve.sglang.middleware import SglangGate

    hooks.require_applied()
    app.add_middleware(SglangGate)
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
